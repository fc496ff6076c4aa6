//! The conformance table over the adapter that is here, case by case with times, and the scalar functions of the arithmetic one by one: `conformance [PART OF A CASE'S TEXT]`.

use attn_conformance::{Outcome, check_case, table};
use attn_core::DecodeAttention;
use attn_cpu::Reference;
use attn_wgpu::WgpuBackend;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = WgpuBackend::open()?;
    let info = backend.device();
    println!("{}: {}", info.name, info.detail);
    for check in backend.check_arithmetic()? {
        println!("{check}");
    }
    let part = std::env::args().nth(1).unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    for case in table(attn_conformance::Size::from_env()?) {
        if !case.to_string().contains(&part) {
            continue;
        }
        let start = std::time::Instant::now();
        let outcome = check_case(&Reference::new(), &backend, &case);
        let took = start.elapsed().as_secs_f32();
        match outcome {
            Outcome::Passed(_) => passed += 1,
            Outcome::Refused(text) => println!("refused {text}"),
            Outcome::Failed(text) => {
                failed += 1;
                println!("FAILED in {took:.1} s: {text}");
            }
        }
        if took > 5.0 {
            println!("{took:.1} s: {case}");
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        return Err("some cases failed".into());
    }
    Ok(())
}
