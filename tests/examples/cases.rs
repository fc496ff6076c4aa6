//! The cases that [`attn_conformance::check_backend`] holds a backend to, without one. `cargo run --example cases`

use attn_conformance::{Size, table};

fn main() {
    for size in [Size::Full, Size::Reduced] {
        let cases = table(size);
        println!("{} cases, such as", cases.len());
        for case in cases.iter().step_by(cases.len() / 4) {
            println!("    {}", case.label(100));
        }
    }
}
