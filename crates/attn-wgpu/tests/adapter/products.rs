//! The ceiling of products is what it counts: no compiler has left a product out.

use attn_conformance::trials::Trials;
use attn_wgpu::{WgpuBackend, internals::products_kernel, wgpu};

use crate::native::{buffer, download};

/// `CHAINS` and `UNROLLED` of `products.wgsl`.
const CHAINS: usize = 16;
const UNROLLED: usize = 4;

/// Four products of signed bytes, added.
fn dot(a: u32, b: u32) -> i32 {
    let products = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    products
        .map(|(a, b)| i32::from(a as i8) * i32::from(b as i8))
        .sum()
}

fn sums_are_those_of_every_product(backend: &WgpuBackend) {
    const LANES: usize = 128;
    let rounds = 3;
    let mut words = vec![rounds];
    words.extend((1..=CHAINS as u32).map(|c| c.wrapping_mul(0x9E37_79B9)));
    let usage = wgpu::BufferUsages::STORAGE;
    let given = buffer(
        backend,
        4 * words.len() as u64,
        usage | wgpu::BufferUsages::COPY_DST,
    );
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    backend.wgpu_queue().write_buffer(&given, 0, &bytes);
    let sums = buffer(
        backend,
        4 * LANES as u64,
        usage | wgpu::BufferUsages::COPY_SRC,
    );
    let pipeline = products_kernel(backend).unwrap();
    let entries = [&given, &sums].map(|buffer| buffer.as_entire_binding());
    let entries: Vec<_> = (0..)
        .zip(entries)
        .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource })
        .collect();
    let gpu = backend.wgpu_device();
    let group = gpu.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &entries,
    });
    let mut encoder = gpu.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        // A workgroup more than the sums have places for: it writes nothing.
        pass.dispatch_workgroups(LANES as u32 / 64 + 1, 1, 1);
    }
    backend.wgpu_queue().submit([encoder.finish()]);
    let codes = &words[1..];
    let of_lane = |lane: usize| {
        let mut sums: [i32; CHAINS] = std::array::from_fn(|c| (lane + c) as i32);
        for n in 0..rounds as usize * UNROLLED {
            for (c, sum) in sums.iter_mut().enumerate() {
                let code = codes[(c + n % UNROLLED) % CHAINS];
                *sum = dot(code, *sum as u32).wrapping_add(*sum);
            }
        }
        sums.iter().fold(0, |all, sum| all ^ sum) as u32
    };
    let want: Vec<u32> = (0..LANES).map(of_lane).collect();
    assert_eq!(download(backend, &sums), want);
}

/// Adds the test of this file.
pub fn add(trials: Trials<WgpuBackend>) -> Trials<WgpuBackend> {
    trials.test(
        "products: sums are those of every product",
        sums_are_those_of_every_product,
    )
}
