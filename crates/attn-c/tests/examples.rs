//! The examples, compiled by this machine's C and C++ compilers against the static library: what a program gets that links it. Those over a GPU's
//! memory are compiled alone: `.ci/gpu c` runs them.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What `rustc --print native-static-libs` names for the library.
const SYSTEM: [&str; 5] = ["-lm", "-lpthread", "-ldl", "-lgcc_s", "-lc"];

/// Cargo builds the library beside this test's program.
fn library() -> PathBuf {
    let program = env::current_exe().expect("a test knows its own program");
    let library = program.with_file_name("libattn_c.a");
    assert!(library.exists(), "{} is missing", library.display());
    library
}

/// What every example is compiled with.
const STRICT: [&str; 5] = ["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"];

/// What the examples over a GPU's memory take from CUDA's runtime, as its header declares it.
const CUDA_RUNTIME: &str = "
#include <stddef.h>
typedef enum cudaError { cudaSuccess = 0 } cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
typedef struct CUstream_st *cudaStream_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
#define cudaHostAllocDefault 0x00
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned int flags);
cudaError_t cudaMemset(void *memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run);
";

/// Compiles and runs an example with what `compiler` names, and returns what it prints.
fn run(compiler: &[&str], source: &str, device: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder for the program");
    let program = folder.path().join("example");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(compiler[0])
        .args(&compiler[1..])
        .args(STRICT)
        .arg("-I")
        .arg(own.join("include"))
        .arg(own.join("examples").join(source))
        .arg(library())
        .args(SYSTEM)
        .arg("-o")
        .arg(&program)
        .output();
    let output = output.unwrap_or_else(|error| {
        panic!(
            "{} compiles the examples, and cannot be run: {error}",
            compiler[0]
        )
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source} does not compile: {said}");
    let output = Command::new(program).arg(device).output();
    let output = output.expect("the example was compiled for this machine");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source}: {said}");
    String::from_utf8(output.stdout).expect("the example prints UTF-8")
}

#[test]
#[cfg(target_os = "linux")]
fn c_decodes_on_the_cpu() {
    let said = run(&["cc", "-std=c99"], "decode.c", "cpu");
    assert!(said.contains("attn 0.1.0 on cpu: "), "{said}");
    assert!(said.contains("the same bits alone, in a batch"), "{said}");
    // Two sequences of 101 tokens that share their first page.
    assert!(said.contains("3 of 32 pages of "), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn c_serves_a_model_of_several_layers() {
    let said = run(&["cc", "-std=c99"], "layers.c", "cpu");
    assert!(
        said.contains("refused, as it should be: k is NaN at token 0, head 0, dim 5"),
        "{said}"
    );
    assert!(
        said.contains("3 layers of 301 tokens in 2 pages each"),
        "{said}"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn c_attends_over_an_engines_pages_in_host_memory() {
    let said = run(&["cc", "-std=c99"], "host_pages.c", "cpu");
    assert!(
        said.contains("two sequences of 129 tokens on 4 pages of"),
        "{said}"
    );
    assert!(
        said.contains("the same bits alone and in a batch"),
        "{said}"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn cpp_decodes_on_the_cpu() {
    let said = run(&["c++", "-std=c++17"], "decode.cpp", "cpu");
    assert!(
        said.contains("refused, as it should be: sequence 7 does not exist"),
        "{said}"
    );
    assert!(said.contains("the same bits when they are back"), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn examples_over_the_memory_of_a_gpu_compile() {
    let folder = tempfile::tempdir().expect("a folder for the header");
    fs::write(folder.path().join("cuda_runtime_api.h"), CUDA_RUNTIME).expect("room for the header");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = fs::read_dir(own.join("examples")).expect("the examples");
    let mut compiled = 0;
    for source in sources.map(|entry| entry.expect("an example").path()) {
        let text = fs::read_to_string(&source).expect("an example is text");
        if !text.contains("cuda_runtime_api.h") {
            continue;
        }
        let output = Command::new("cc")
            .args(["-std=c99", "-fsyntax-only"])
            .args(STRICT)
            .arg("-I")
            .arg(own.join("include"))
            .arg("-I")
            .arg(folder.path())
            .arg(&source)
            .output()
            .expect("cc compiles the examples");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", source.display());
        compiled += 1;
    }
    assert_eq!(compiled, 4, "examples over the memory of a GPU");
}
