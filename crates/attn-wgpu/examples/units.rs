//! What an adapter does per clock and SM of each instruction that a decode kernel could be made of.
//!
//! `units [name …]`: rates in 10^12 per second of all lanes, and how many workgroups run at once for an amount of workgroup memory.
//! `docs/wgpu.md` has what came out, and what followed.

use attn_core::DecodeAttention;
use attn_wgpu::{WgpuBackend, bench::WgpuTimer, wgpu};
use wgpu::BufferUsages as Usage;

type Any<T> = Result<T, Box<dyn std::error::Error>>;

/// One kernel: `each` is repeated by a loop of 16 steps in a loop of `STEPS`.
struct Unit {
    name: String,
    /// Variables of the workgroup.
    head: String,
    /// Before the loops; `a` and `lane` are there, and unknown to the compiler.
    before: String,
    each: String,
    /// Stored at the end, an u32.
    sum: String,
    /// What is counted, per thread and step.
    count: f64,
    threads: u32,
}

const STEPS: u32 = 64;

impl Unit {
    fn text(&self) -> String {
        let Unit {
            head,
            before,
            each,
            sum,
            threads,
            ..
        } = self;
        let each = each.repeat(16);
        format!(
            "{head}
            @group(0) @binding(0) var<storage, read_write> x: array<u32>;
            @compute @workgroup_size({threads})
            fn unit(@builtin(local_invocation_index) lane: u32) {{
                var a = x[lane];
                let steps = x[1024];
                {before}
                for (var i = 0u; i < steps; i++) {{
                    {each}
                }}
                x[lane] = {sum};
            }}"
        )
    }
}

/// Eight accumulators: each step is done for every `#` of 0..8, with `b#` and `s#` from `start`; `c` changes with every step, so that
/// nothing is shared.
fn chains(name: &str, [first, start]: [&str; 2], step: &str, sum: &str) -> Unit {
    let of = |text: &str, k: usize| text.replace('#', &k.to_string());
    let before: String = (0..8)
        .map(|k| of(&format!("var s# = {start}; let b# = {start};"), k))
        .collect();
    let each: String = (0..8).map(|k| of(step, k)).collect();
    let sums: Vec<_> = (0..8).map(|k| of(sum, k)).collect();
    let parts = [
        &format!("var c = {first}; {before}")[..],
        &format!("{each} c = c + c;"),
        &sums.join(" ^ "),
    ];
    Unit {
        count: 8.0,
        ..single(name, "", parts, 256)
    }
}

const WORD: [&str; 2] = ["a", "a + #u * 77u"];
const INTEGER: [&str; 2] = ["i32(a)", "i32(a) + # * 77"];
const FLOAT: [&str; 2] = ["bitcast<f32>(a)", "f32(a + #u)"];

/// Name, start, step and sum of chains.
type Chain = (&'static str, [&'static str; 2], &'static str, &'static str);

const CHAINS: [Chain; 8] = [
    ("dot4I8Packed(a, b) + s", WORD, "s# = u32(dot4I8Packed(c, b#) + i32(s#));", "s#"),
    ("dot4U8Packed(a, b) + s", WORD, "s# = dot4U8Packed(c, b#) + s#;", "s#"),
    ("i32 a * b + s", INTEGER, "s# = c * b# + s#;", "u32(s#)"),
    ("f32 a * b + s", FLOAT, "s# = c * b# + s#;", "bitcast<u32>(s#)"),
    ("u32 (s ^ a) + b", WORD, "s# = (s# ^ c) + b#;", "s#"),
    ("f32(u32) + a", WORD, "s# = bitcast<u32>(f32(s#)) + c;", "s#"),
    (
        "four f32 of unpack4xI8, added",
        WORD,
        "{ let t = vec4<f32>(unpack4xI8(s# + c)); s# = bitcast<u32>((t.x + t.y) + (t.z + t.w)); }",
        "s#",
    ),
    (
        "four bytes or'ed into f32, added",
        WORD,
        "{ let t = bitcast<vec4<f32>>((vec4<u32>(s# + c) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u)
            | vec4<u32>(0x4B000000u)); s# = bitcast<u32>((t.x + t.y) + (t.z + t.w)); }",
        "s#",
    ),
];

fn scalar_units() -> Vec<Unit> {
    let mut units: Vec<_> = CHAINS
        .iter()
        .map(|(name, start, step, sum)| chains(name, *start, step, sum))
        .collect();
    // Do they run beside one another?
    let step = "s# = dot4U8Packed(c, b#) + s#; f# = d * g# + f#;";
    let mut both = chains(
        "a dot4U8Packed and an f32 a * b + s",
        WORD,
        step,
        "s# ^ bitcast<u32>(f#)",
    );
    both.before += "var d = f32(a);";
    for k in 0..8 {
        both.before += &format!("var f{k} = f32(a + {k}u); let g{k} = f32(a) * {k}.0;");
    }
    both.each += "d = d + d;";
    units.push(both);
    units
}

/// One thing per step, of `threads` threads.
fn single(name: &str, head: &str, [before, each, sum]: [&str; 3], threads: u32) -> Unit {
    Unit {
        name: name.to_owned(),
        head: head.to_owned(),
        before: before.to_owned(),
        each: each.to_owned(),
        sum: sum.to_owned(),
        count: 1.0,
        threads,
    }
}

fn memory_units() -> Vec<Unit> {
    let words = "var<workgroup> w: array<vec4<u32>, 160>;";
    let filled =
        "w[lane & 127u] = vec4<u32>(a); workgroupBarrier(); var t = vec4<u32>(a); var n = 0u;";
    let load = |name: &str, at: &str| {
        let each = format!("t = t ^ w[({at}) + n]; n = (n + 1u) & 31u;");
        single(name, words, [filled, &each, "t.x ^ t.y ^ t.z ^ t.w"], 256)
    };
    let store = [
        "var n = 0u; let t = vec4<u32>(a);",
        "w[((lane + i) & 127u) + n] = t; n = (n + 1u) & 31u;",
        "w[lane & 127u].x",
    ];
    let post = [
        "var n = 0u;",
        "atomicMax(&w[n & 15u], a + i); n = n + 1u;",
        "atomicLoad(&w[lane & 15u])",
    ];
    let atomics = "var<workgroup> w: array<atomic<u32>, 16>;";
    vec![
        load(
            "16-byte load, the same for all lanes",
            "(i * 16u + a) & 127u",
        ),
        load("16-byte load, one per lane", "(i * 16u + a + lane) & 127u"),
        single("16-byte store", words, store, 256),
        single("atomicMax, all lanes in one place", atomics, post, 32),
    ]
}

/// Workgroups of 32 threads that wait for one chain: their time tells how many run at once.
fn occupancy_units() -> Vec<Unit> {
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
        .iter()
        .map(|kib| {
            let words = kib * 256 - 16;
            let head = format!("var<workgroup> w: array<u32, {words}>;");
            let before = format!("w[(a + lane) % {words}u] = a; var t = a; var c = a;");
            let sum = format!("t ^ w[lane * {}u]", words / 32);
            let parts = [&before[..], "t = (t ^ c) * 77u; c = c + c;", &sum];
            single(&format!("one chain beside {kib} KiB"), &head, parts, 32)
        })
        .collect()
}

fn units() -> Vec<Unit> {
    let kinds = [scalar_units(), memory_units(), occupancy_units()];
    kinds.into_iter().flatten().collect()
}

fn main() -> Any<()> {
    let wanted: Vec<_> = std::env::args().skip(1).collect();
    let timer = WgpuTimer::of(WgpuBackend::open()?)?;
    let backend = timer.backend();
    println!("{}: {}", backend.device().name, backend.device().detail);
    for unit in units() {
        if !wanted.is_empty() && !wanted.iter().any(|w| unit.name.contains(w.as_str())) {
            continue;
        }
        measure(&timer, &unit)?;
    }
    Ok(())
}

fn measure(timer: &WgpuTimer, unit: &Unit) -> Any<()> {
    let (gpu, queue) = (timer.backend().wgpu_device(), timer.backend().wgpu_queue());
    // SAFETY: every index is masked or bounded by the lengths declared in the same text, and loops end at `STEPS`.
    let module = unsafe {
        gpu.create_shader_module_trusted(
            wgpu::ShaderModuleDescriptor {
                label: None,
                source: wgpu::ShaderSource::Wgsl(unit.text().into()),
            },
            wgpu::ShaderRuntimeChecks::unchecked(),
        )
    };
    let pipeline = gpu.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache: None,
    });
    let x = gpu.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 8192,
        usage: Usage::STORAGE | Usage::COPY_DST,
        mapped_at_creation: false,
    });
    queue.write_buffer(&x, 4096, &STEPS.to_le_bytes());
    let group = gpu.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry {
            binding: 0,
            resource: x.as_entire_binding(),
        }],
    });
    // A software adapter only shows that the kernels run.
    let workgroups = match (
        timer.backend().device().detail.contains("software"),
        unit.threads,
    ) {
        (true, _) => 2,
        (_, 256) => 2112,
        _ => 8448,
    };
    let timing = timer.time(4, 5, &mut |encoder, _| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(workgroups, 1, 1);
        Ok(())
    })?;
    let threads = f64::from(workgroups) * f64::from(unit.threads);
    let rate = threads * f64::from(STEPS) * 16.0 * unit.count / timing.median / 1e6;
    println!(
        "{:<44} {rate:8.3} e12 per second   {:8.1} us",
        unit.name, timing.median
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    /// Nothing else in CI looks at these kernels.
    #[test]
    fn every_unit_is_valid() {
        for unit in super::units() {
            let text = unit.text();
            let module = naga::front::wgsl::parse_str(&text)
                .unwrap_or_else(|e| panic!("{}: {}", unit.name, e.emit_to_string(&text)));
            Validator::new(ValidationFlags::all(), Capabilities::empty())
                .validate(&module)
                .unwrap_or_else(|e| panic!("{}: {}", unit.name, e.emit_to_string(&text)));
        }
    }
}
