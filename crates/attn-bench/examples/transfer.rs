//! What a GPU takes to export rows from pages, to copy and swap pages, and to merge shards' results: microseconds and GB/s (bytes read and
//! written) beside the driver's copy of as many bytes in the same run.

use attn_bench::{Timer, cuda::CudaTimer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut timer = CudaTimer::open()?;
    println!("{}", timer.device());
    println!("| work | µs | GB/s | of the driver's copy |\n|---|---|---|---|");
    for transfer in timer.transfers(15)? {
        let us = transfer.work.median;
        let share = |copy: attn_bench::Timing| format!("{:.0} %", 100.0 * copy.median / us);
        println!(
            "| {} | {us:.1} | {:.0} | {} |",
            transfer.name,
            transfer.bytes as f64 / us / 1e3,
            transfer.copy.map_or("–".into(), share)
        );
    }
    Ok(())
}
