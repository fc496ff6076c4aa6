//! What an adapter does per clock and SM of each instruction that a decode kernel could be made of.
//!
//! `units [name …]`: rates in 10^12 per second of all lanes (of cooperative matrices: of 16×16×16 products, in 10^9), and how many
//! workgroups run at once for an amount of workgroup memory. `docs/performance.md` has what came out, and what followed.

use attn_core::DecodeAttention;
use attn_wgpu::{WgpuBackend, bench::WgpuTimer, wgpu};
use wgpu::BufferUsages as Usage;

type Any<T> = Result<T, Box<dyn std::error::Error>>;

/// One kernel: `each` is repeated by a loop of 16 steps in a loop of `STEPS`.
struct Unit {
    name: String,
    /// Enabled features, and variables of the workgroup.
    head: String,
    /// Before the loops; `a` and `lane` are there, and unknown to the compiler.
    before: String,
    each: String,
    /// Stored at the end, an u32.
    sum: String,
    /// What is counted, per thread and step; of cooperative matrices per subgroup.
    count: f64,
    threads: u32,
    matrix: bool,
}

const STEPS: u32 = 64;

impl Unit {
    fn text(&self) -> String {
        let Unit { head, before, each, sum, threads, .. } = self;
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

/// Eight accumulators of a type, each step of which is `f(a, b_k, s_k)`; `a` changes with every step, so nothing is shared.
fn chains(name: &str, head: &str, start: [&str; 2], step: &str, sum: &str, count: f64) -> Unit {
    let [a, b] = start;
    let each: String = (0..8).map(|k| step.replace('#', &k.to_string())).collect();
    let before: String = (0..8)
        .map(|k| {
            let b = b.replace('#', &k.to_string());
            format!("var s{k} = {b}; let b{k} = {b};")
        })
        .collect();
    let total: Vec<_> = (0..8).map(|k| sum.replace('#', &k.to_string())).collect();
    Unit {
        name: name.to_owned(),
        head: head.to_owned(),
        before: format!("var c = {a}; {before}"),
        each: format!("{each} c = c + c;"),
        sum: total.join(" ^ "),
        count: 8.0 * count,
        threads: 256,
        matrix: false,
    }
}

fn scalar_units() -> Vec<Unit> {
    let word = ["a", "a + #u * 77u"];
    let float = ["bitcast<f32>(a)", "f32(a + #u)"];
    let mut units = vec![
        chains("dot4I8Packed", "", ["a", "i32(a) + # * 77"], "s# = dot4I8Packed(c, u32(b#)) + s#;", "u32(s#)", 1.0),
        chains("dot4U8Packed", "", word, "s# = dot4U8Packed(c, b#) + s#;", "s#", 1.0),
        chains("i32 a * b + s", "", ["i32(a)", "i32(a) + # * 77"], "s# = c * b# + s#;", "u32(s#)", 1.0),
        chains("f32 a * b + s", "", float, "s# = c * b# + s#;", "bitcast<u32>(s#)", 1.0),
        chains("i32 xor", "", word, "s# = (s# ^ c) + b#;", "s#", 1.0),
        chains("i32 to f32", "", word, "s# = bitcast<u32>(f32(s#)) + c;", "s#", 1.0),
        chains("unpack4xI8 to f32 (4)", "", word, "{let t = vec4<f32>(unpack4xI8(s# + c)); s# = bitcast<u32>((t.x + t.y) + (t.z + t.w));}", "s#", 1.0),
        chains("byte or'ed into f32 (4)", "", word,
            "{let t = bitcast<vec4<f32>>((vec4<u32>(s# + c) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u) | vec4<u32>(0x4B000000u)); s# = bitcast<u32>((t.x + t.y) + (t.z + t.w));}", "s#", 1.0),
    ];
    units.push(chains("f16x2 a * b + s", "enable f16;", ["vec2<f16>(f16(a), f16(lane))", "vec2<f16>(f16(a + #u), f16(a))"],
        "s# = fma(c, b#, s#);", "u32(s#.x + s#.y)", 1.0));
    // Half of each: do they run beside one another?
    let mut both = chains("dot4I8Packed and f32 a * b + s, pairs", "", ["a", "i32(a) + # * 77"],
        "s# = dot4I8Packed(c, u32(b#)) + s#; f# = d * g# + f#;", "u32(s#) ^ bitcast<u32>(f#)", 1.0);
    both.before += "var d = f32(a);";
    for k in 0..8 {
        both.before += &format!("var f{k} = f32(a + {k}u); let g{k} = f32(a) * {k}.0;");
    }
    both.each += "d = d + d;";
    units.push(both);
    units
}

/// Loads from workgroup memory, one word of which is used by as many products as in the kernels.
fn memory_units() -> Vec<Unit> {
    let mut units = Vec::new();
    for (name, at) in [("the same for all lanes", "(i * 16u + a) & 127u"), ("one per lane", "(i * 16u + a + lane) & 127u")] {
        let mut unit = chains(&format!("16-byte load, {name}"), "var<workgroup> w: array<vec4<u32>, 160>;", ["a", "a + #u"], "", "s#", 0.0);
        unit.before += "w[lane & 127u] = vec4<u32>(a); workgroupBarrier(); var t = vec4<u32>(a); var n = 0u;";
        unit.each = format!("t = t ^ w[({at}) + n]; n = (n + 1u) & 31u;");
        unit.sum += "^ t.x ^ t.y ^ t.z ^ t.w";
        unit.count = 1.0;
        units.push(unit);
    }
    let mut unit = chains("16-byte store", "var<workgroup> w: array<vec4<u32>, 160>;", ["a", "a + #u"], "", "s#", 0.0);
    unit.before += "var n = 0u; let t = vec4<u32>(a); workgroupBarrier();";
    unit.each = "w[((lane + i) & 127u) + n] = t; n = (n + 1u) & 31u;".into();
    unit.sum += "^ w[lane & 127u].x";
    unit.count = 1.0;
    units.push(unit);
    let mut unit = chains("atomicMax, all lanes", "var<workgroup> w: array<atomic<u32>, 16>;", ["a", "a + #u"], "", "s#", 0.0);
    unit.before += "var n = 0u;";
    unit.each = "atomicMax(&w[n & 15u], a + i); n = n + 1u;".into();
    unit.sum += "^ atomicLoad(&w[lane & 15u])";
    unit.count = 1.0;
    unit.threads = 32;
    units.push(unit);
    let mut unit = chains("subgroupAdd", "", ["a", "a + #u"], "s# = subgroupAdd(s#) + c;", "s#", 1.0);
    unit.threads = 32;
    units.push(unit);
    let mut unit = chains("subgroupMax", "", ["a", "a + #u"], "s# = subgroupMax(s#) + c;", "s#", 1.0);
    unit.threads = 32;
    units.push(unit);
    units
}

/// Workgroups of 32 threads that wait for one chain: their time tells how many run at once.
fn occupancy_units() -> Vec<Unit> {
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
        .iter()
        .map(|kib| {
            let words = kib * 256 - 16;
            let mut unit = chains(&format!("one chain, {kib} KiB"), &format!("var<workgroup> w: array<u32, {words}>;"), ["a", "a + #u"], "", "s#", 0.0);
            unit.before += &format!("w[(a + lane) % {words}u] = a; var t = a;");
            unit.each = "t = (t ^ c) * 77u;".into();
            unit.sum += &format!("^ t ^ w[lane * {}u]", words / 32);
            unit.count = 1.0;
            unit.threads = 32;
            unit
        })
        .collect()
}

fn matrix_units() -> Vec<Unit> {
    let enable = "enable f16; enable wgpu_int16; enable wgpu_cooperative_matrix;";
    let sums: String = (0..4).map(|k| format!("var s{k}: coop_mat16x16<f32, C>;")).collect();
    let store: String = (0..4).map(|k| format!("coopStoreT(s{k}, &out[{}], 16u);", 256 * k)).collect();
    let unit = |name: &str, head: &str, before: &str, each: &str, count: f64, threads: u32| Unit {
        name: name.to_owned(),
        head: format!("{enable} var<workgroup> out: array<f32, {}>; {head}", 1024 * (threads / 32)),
        before: format!("{before} {sums}"),
        each: each.to_owned(),
        sum: format!("a; {store} workgroupBarrier(); x[lane + 256u] = bitcast<u32>(out[lane])"),
        count,
        threads,
        matrix: true,
    };
    let codes = "var<workgroup> codes: array<vec4<f16>, 1024>; 
        fn halves(word: u32) -> vec4<f16> { return bitcast<vec4<f16>>(vec4<u16>(vec4<u32>(word & 0xFFu, (word >> 8u) & 0xFFu, (word >> 16u) & 0xFFu, word >> 24u))); }";
    let fill = "for (var k = lane; k < 1024u; k += 32u) { codes[k] = vec4<f16>(f16(a)); } workgroupBarrier();";
    let ab = "let ma = coopLoadT<coop_mat16x16<f16, A>>(&codes[0], 4u); let mb = coopLoad<coop_mat16x16<f16, B>>(&codes[64], 4u);";
    let product: String = (0..4).map(|k| format!("s{k} = coopMultiplyAdd(ma, mb, s{k});")).collect();
    let mut units = vec![unit("matrix products", codes, &format!("{fill} {ab}"), &product, 4.0, 32)];
    for (name, load, stride) in [
        ("B, column by column, 32 bytes apart", "coopLoad<coop_mat16x16<f16, B>>", 4),
        ("B, column by column, 40 bytes apart", "coopLoad<coop_mat16x16<f16, B>>", 5),
        ("B, column by column, 48 bytes apart", "coopLoad<coop_mat16x16<f16, B>>", 6),
        ("B, column by column, 272 bytes apart", "coopLoad<coop_mat16x16<f16, B>>", 34),
        ("B, row by row, 32 bytes apart", "coopLoadT<coop_mat16x16<f16, B>>", 4),
        ("B, row by row, 48 bytes apart", "coopLoadT<coop_mat16x16<f16, B>>", 6),
        ("B, row by row, 144 bytes apart", "coopLoadT<coop_mat16x16<f16, B>>", 18),
    ] {
        let each: String = (0..4)
            .map(|k| format!("{{ let mb = {load}(&codes[at + {}u], {stride}u); s{k} = coopMultiplyAdd(ma, mb, s{k}); }}", 64 * k))
            .collect();
        units.push(unit(
            &format!("load {name}, and product"),
            codes,
            &format!("{fill} {ab} var at = 0u;"),
            &format!("{each} at = (at + 2u) & 63u;"),
            4.0,
            32,
        ));
    }
    let each = "codes[(lane * 6u + n) & 1023u] = halves(c); codes[(lane * 6u + n + 1u) & 1023u] = halves(c + 77u); c = c * 5u; n = n + 16u;";
    units.push(unit("two words widened and stored", codes, "var c = a; var n = 0u;", each, 1.0, 32));
    let store: String = (0..4).map(|k| format!("coopStoreT(s{k}, &out[at + {}u], 64u);", 16 * (k % 2))).collect();
    units.push(unit("sums stored, 64 apart", "",
        "var at = 0u;", &format!("{store} at = (at + 4u) & 31u; s0 = s0 + s1;"), 4.0, 32));
    units
}

fn units() -> Vec<Unit> {
    let kinds = [scalar_units(), memory_units(), occupancy_units(), matrix_units()];
    kinds.into_iter().flatten().collect()
}

fn main() -> Any<()> {
    let wanted: Vec<_> = std::env::args().skip(1).collect();
    let timer = WgpuTimer::of(WgpuBackend::open()?)?;
    let backend = timer.backend();
    println!("{}: {}", backend.device().name, backend.device().detail);
    let gpu = backend.wgpu_device();
    for unit in units() {
        if !wanted.is_empty() && !wanted.iter().any(|w| unit.name.contains(w.as_str())) {
            continue;
        }
        let features = gpu.features();
        if unit.matrix && !features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
            || unit.head.contains("f16") && !features.contains(wgpu::Features::SHADER_F16)
            || unit.name.contains("subgroup") && !features.contains(wgpu::Features::SUBGROUP)
        {
            println!("{:<44} not here: the device lacks the feature (ATTN_WGPU_FEATURES=matrix asks for it)", unit.name);
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
            wgpu::ShaderModuleDescriptor { label: None, source: wgpu::ShaderSource::Wgsl(unit.text().into()) },
            wgpu::ShaderRuntimeChecks::unchecked(),
        )
    };
    let pipeline = gpu.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: wgpu::PipelineCompilationOptions { zero_initialize_workgroup_memory: false, ..Default::default() },
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
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: x.as_entire_binding() }],
    });
    // A software adapter only shows that the kernels run.
    let workgroups = match (timer.backend().device().detail.contains("software"), unit.threads) {
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
    let parts = if unit.matrix { unit.threads / 32 } else { unit.threads };
    let count = f64::from(workgroups) * f64::from(parts) * f64::from(STEPS) * 16.0 * unit.count;
    let rate = count / timing.median / 1e6;
    let text = if unit.matrix { format!("{:8.2} e9", rate * 1000.0) } else { format!("{rate:8.3} e12") };
    println!("{:<44} {text} per second   {:8.1} us", unit.name, timing.median);
    Ok(())
}

#[cfg(test)]
mod tests {
    use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};

    /// Where the device lacks a feature nothing else looks at its kernels.
    #[test]
    fn every_unit_is_valid() {
        for unit in super::units() {
            let text = unit.text();
            let module = naga::front::wgsl::parse_str(&text).unwrap_or_else(|e| panic!("{}: {}", unit.name, e.emit_to_string(&text)));
            let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
            validator.subgroup_stages(ShaderStages::COMPUTE).subgroup_operations(SubgroupOperationSet::all());
            validator.validate(&module).unwrap_or_else(|e| panic!("{}: {}", unit.name, e.emit_to_string(&text)));
        }
    }
}
