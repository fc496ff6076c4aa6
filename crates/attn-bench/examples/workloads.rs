//! What `attn bench` times: every named workload with the bytes that a step has to read. `cargo run --example workloads`

fn main() {
    for workload in attn_bench::workloads() {
        println!(
            "{:48} {:10.1} MB",
            workload.to_string(),
            workload.bytes() as f64 / 1e6
        );
    }
}
