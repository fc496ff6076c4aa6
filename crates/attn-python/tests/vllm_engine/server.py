"""`vllm serve` in a process of its own, whose answers over HTTP are those of an engine in this one."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

PORT = 8123


def same_over_http(prompts, answers, model, arguments):
    """The server gives the tokens of `answers`, which an engine with the same options gave."""
    command = f"serve {model} --attention-backend ATTN --port {PORT} --max-model-len 1024 --max-num-batched-tokens 256 --max-num-seqs 16 --num-gpu-blocks-override 1001"
    command += f" --skip-tokenizer-init --seed 0 {arguments}"
    environment = dict(os.environ, VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.cli.main", *command.split()], env=environment, stdout=log, stderr=subprocess.STDOUT)
        begun = time.time()
        try:
            ask(server, "/health")
            for given, (tokens, _) in zip(prompts, answers):
                request = dict(model=model, prompt=given["prompt_token_ids"], max_tokens=16, temperature=0, ignore_eos=True, return_token_ids=True)
                answer = ask(server, "/v1/completions", request)
                assert answer["choices"][0]["token_ids"] == tokens, "the server gives other tokens"
            print(f"over HTTP: {time.time() - begun:.1f} s", flush=True)
        except Exception:
            log.seek(0)
            print(log.read()[-4000:])
            raise
        finally:
            server.terminate()
            server.wait(30)


def ask(server, path, body=None):
    """A request to the server, again until it is there."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"})
    for _ in range(120):
        assert server.poll() is None, f"the server ended with status {server.returncode}"
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError("the server did not answer in two minutes")
