//! Divisors divide, C++ types have the sizes of Rust's, and params.h is current.

use super::*;
use std::{env, fs, path::Path};

#[test]
fn prepared_divisors_divide() {
    let quotient = |d: FastDivmod, n: u32| {
        ((u64::from(2 * n) * u64::from(d.multiplier)) >> 32 >> d.shift) as u32
    };
    for divisor in (1..3000).chain([4095, 65_537, (1 << 30) - 1, 1 << 30]) {
        let d = FastDivmod::new(divisor as usize);
        let most = (1u32 << 31) - 1;
        let last = most / divisor * divisor;
        for n in [
            0,
            1,
            divisor - 1,
            divisor,
            2 * divisor - 1,
            last - 1,
            last,
            most,
            most / 2,
            123_456_789,
        ] {
            assert_eq!(quotient(d, n), n / divisor, "{n} / {divisor}");
        }
    }
}

#[test]
fn cpp_types_have_the_size_of_their_rust_types() {
    for block in BLOCKS {
        for field in block.fields {
            let size = match field.kind {
                "int" | "unsigned int" | "float" => 4,
                "FastDivmod" => size_of::<FastDivmod>(),
                "DecodeParams" => size_of::<DecodeParams>(),
                "long long" | "alignas(64) long long" | "unsigned long long" => 8,
                pointer => {
                    assert!(pointer.ends_with('*'), "{pointer} has no known size");
                    8
                }
            };
            let name = (block.name, field.name);
            assert_eq!(size * field.count.max(1), field.size, "{name:?}");
        }
    }
}

#[test]
fn params_h_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/common/params.h");
    if env::var("ATTN_UPDATE").is_ok_and(|update| update == "1") {
        fs::write(&path, header()).unwrap();
    }
    let current = fs::read_to_string(&path).unwrap();
    assert!(
        current == header(),
        "params.h is old; run ATTN_UPDATE=1 cargo test -p attn-kernels"
    );
}
