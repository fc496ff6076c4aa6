// Measures what is chosen and shows it. The library does the work (attn_web.js, made from crates/attn-web); nothing here computes.
import init, { Device, File, formats } from "./attn_web.js";

const BUNDLED = "smollm2-decode.safetensors";
const WASM = "wasm";
const BYTES_BF16 = (dims) => 4 * dims;
const $ = (id) => document.getElementById(id);

// What a program that drives this page reads: whether it is done, and the figures.
const attn = (window.attn = { state: "loading", problem: null, webgpu: null, rows: {} });

let bundled, native, file, devices = [];
// The newest choice: a run of an older one ends at its next step.
let newest = 0, running = Promise.resolve();

const text = (tag, content, className) => {
  const element = document.createElement(tag);
  element.textContent = content;
  if (className) element.className = className;
  return element;
};

function say(problem) {
  attn.problem = problem;
  $("problem").hidden = !problem;
  $("problem").textContent = problem ?? "";
}

function failed(error) {
  attn.state = "failed";
  say(String(error?.message ?? error));
  status("");
}
// Errors in the library's own tasks come this way alone.
window.addEventListener("error", (event) => failed(event.error ?? event.message));
window.addEventListener("unhandledrejection", (event) => failed(event.reason));

function status(words, kind = "") {
  $("status").textContent = words;
  $("status").className = kind || "quiet";
}

// Lets the browser draw.
const drawn = () => new Promise((resolve) => setTimeout(resolve, 20));

function option(value, label) {
  const element = text("option", label);
  element.value = value;
  return element;
}

function showDevice(title, lines, className) {
  const item = text("li", "", className);
  item.append(text("b", title), ...lines.map((line) => text("span", line)));
  $("devices").append(item);
}

async function openDevices() {
  try {
    const gpu = await Device.gpu();
    const [known, detail] = gpu.describe();
    // A browser tells the script more than it tells the library.
    const { vendor, architecture, description } = (await navigator.gpu.requestAdapter())?.info ?? {};
    const name = description || [vendor, architecture].filter(Boolean).join(" ") || known;
    const arithmetic = JSON.parse(await gpu.arithmetic());
    attn.webgpu = { name, detail, arithmetic };
    const agrees = arithmetic.differing
      ? `Its arithmetic is not the specified one: ${arithmetic.first}.`
      : `${arithmetic.functions} scalar functions, ${arithmetic.tried.toLocaleString("en")} inputs: every bit as specified.`;
    const software = detail.startsWith("software") ? ["A program on the CPU: its speed says nothing of a GPU's."] : [];
    showDevice("WebGPU", [`${name} · ${detail.split(",")[0]}`, agrees, ...software]);
    devices.push({ key: "webgpu", label: "WebGPU", device: gpu });
  } catch (error) {
    showDevice("WebGPU", ["absent"], "absent");
    say(`WebGPU cannot be used here, so only the CPU is measured. ${error.message}`);
  }
  const cpu = Device.cpu();
  const [name, detail] = cpu.describe();
  showDevice("CPU, in WebAssembly", [`${name} · ${detail.split(",")[0]} · one thread`]);
  devices.push({ key: "cpu", label: WASM, device: cpu });
  showDevice("CPU that built this page", [native.machine.replace(",", " ·"), "Its digests of the bundled data came with the page."]);
}

function offer() {
  $("shape").textContent = file.describe();
  const contexts = [...file.contexts()].reverse();
  $("context").replaceChildren(...contexts.map((n) => option(n, `${n.toLocaleString("en")} tokens`)));
}

const pairs = (entries) => {
  const list = document.createElement("dl");
  for (const [label, value, className] of entries) {
    list.append(text("dt", label), text("dd", value, className));
  }
  return list;
};

const rate = (x) => x.toLocaleString("en", { maximumSignificantDigits: 3 });

function verdict({ promised, digests }) {
  const all = Object.values(digests);
  if (all.length < 2) return ["one device alone", ""];
  if (new Set(all).size === 1) return [`same bits on all ${all.length}`, "same"];
  return promised ? ["bits differ", "differ"] : ["not promised", ""];
}

// What the whole table says of the formats that promise their bits.
function conclusion() {
  const promised = Object.entries(attn.rows).filter(([, row]) => row.promised);
  const differ = promised.filter(([, row]) => new Set(Object.values(row.digests)).size > 1);
  const names = (rows) => rows.map(([name]) => name).join(", ");
  if (differ.length) return [`${names(differ)}: the bits differ, and they must not.`, "differ"];
  const where = ordered(promised[0]?.[1].digests ?? {}).map(([label]) => (label === WASM ? "the CPU in WebAssembly" : label));
  if (!promised.length) return ["This format promises a bound of the error, and no bits.", ""];
  if (where.length < 2) return ["Measured on one device: there is nothing to compare.", ""];
  return [`${names(promised)}: the same bits on ${where.slice(0, -1).join(", ")} and ${where.at(-1)}.`, "same"];
}

// In the order of the cards.
const ordered = (by) => Object.entries(by).sort(([a], [b]) => rank(a) - rank(b));
const rank = (label) => ["WebGPU", WASM].indexOf(label) + 1 || 3;

function showRow(name, row) {
  const tr = document.createElement("tr");
  const heading = text("th", name);
  heading.scope = "row";
  const bytes = text("td", "", "bytes");
  const part = row.bytes / BYTES_BF16(row.dims);
  const bar = document.createElement("i");
  bar.style.setProperty("--part", `${100 * part}%`);
  bytes.append(`${row.bytes} `, text("small", `${Math.round(100 * part)} % of bf16`), bar);
  const error = text("td", `${(100 * row.error).toFixed(3)} %`, "number");
  const rates = text("td", "", "number");
  rates.append(pairs(ordered(row.rates).map(([label, x]) => [label, rate(x)])));
  const digests = text("td", "");
  const entries = ordered(row.digests);
  digests.append(pairs(entries.map(([label, digest]) => [label, digest, digest === row.digests[WASM] ? "digest" : "digest other"])));
  if (!row.promised) digests.querySelectorAll(".other").forEach((other) => other.classList.remove("other"));
  const [words, kind] = verdict(row);
  const bits = text("td", "");
  bits.append(text("span", words, `verdict ${kind}`));
  tr.append(heading, bytes, error, rates, digests, bits);
  const old = $("rows").querySelector(`tr[data-format="${name}"]`);
  tr.dataset.format = name;
  old ? old.replaceWith(tr) : $("rows").append(tr);
}

async function measureAll(mine) {
  attn.state = "running";
  attn.rows = {};
  $("rows").replaceChildren();
  const context = Number($("context").value);
  const chosen = $("format").value ? [$("format").value] : formats();
  status(`Computing the exact result over ${context} tokens …`);
  await drawn();
  const cut = file.at(context);
  try {
    for (const format of chosen) {
      const row = { rates: {}, digests: {} };
      // The CPU first: it says what the bits are.
      for (const { key, label, device } of [...devices].reverse()) {
        status(`${format} on ${label} …`);
        await drawn();
        const figures = JSON.parse(await device.measure(cut, format));
        if (mine !== newest) return;
        row.rates[label] = figures.tokens_per_s;
        row.digests[label] = figures.digest;
        row[key] = figures;
        Object.assign(row, { bytes: figures.bytes, dims: figures.dims, error: figures.error, promised: figures.promised });
      }
      const expected = file === bundled && native.digests[context]?.[format];
      if (expected) row.digests[native.machine.split(",")[0]] = expected;
      attn.rows[format] = row;
      showRow(format, row);
    }
  } finally {
    cut.free();
  }
  const [words, kind] = conclusion();
  status(words, kind);
  attn.state = "done";
}

function measure() {
  const mine = ++newest;
  attn.state = "running";
  running = running.then(() => (mine === newest ? measureAll(mine) : undefined)).catch(failed);
}

async function pick() {
  const picked = $("file").files[0];
  if (!picked) return;
  try {
    const read = new File(new Uint8Array(await picked.arrayBuffer()));
    say(null);
    file = read;
    offer();
    measure();
  } catch (error) {
    say(`${picked.name}: ${error.message}`);
  }
}

async function fetched(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} is not beside this page (${response.status}); serve the whole folder that cargo xtask web makes`);
  return response;
}

async function start() {
  await init({ module_or_path: new URL("attn_web_bg.wasm", import.meta.url) });
  native = await (await fetched("native.json")).json();
  bundled = file = new File(new Uint8Array(await (await fetched(BUNDLED)).arrayBuffer()));
  $("format").append(...formats().map((name) => option(name, name)));
  offer();
  await openDevices();
  $("format").addEventListener("change", measure);
  $("context").addEventListener("change", measure);
  $("file").addEventListener("change", pick);
  $("data").addEventListener("change", () => {
    const own = $("data").value === "file";
    $("file").hidden = !own;
    if (own) return $("file").showPicker?.();
    $("file").value = "";
    file = bundled;
    offer();
    measure();
  });
  measure();
}

start().catch(failed);
