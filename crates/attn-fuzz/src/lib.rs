//! Fuzzers for every door of `attn` that takes outside input.
//!
//! A fuzzer is a function of an [`arbitrary::Unstructured`]: it draws an input, gives it to the code under test, and says
//! what does not hold. [`driver`] makes inputs from seeds and runs each fuzzer in a child process of limited memory, so that
//! a panic, an abort or an endless loop is a find with a seed, too. `cargo xtask fuzz` builds and starts it.
//!
//! The oracles here share no code with `attn-core`'s quantizers and address formulas: [`pages`] reads pages by the text of
//! FORMATS.md, [`oracle`] attends in f64.

pub mod backends;
pub mod convert;
pub mod draw;
pub mod driver;
pub mod faulty;
pub mod files;
pub mod lives;
pub mod oracle;
pub mod pages;
pub mod program;
pub mod sizes;
pub mod states;
pub mod tensors;
pub mod views;
pub mod wgsl;

use arbitrary::Unstructured;

/// A fuzzer's body: draws an input and says what does not hold for it.
pub type Fuzz = fn(&mut Unstructured<'_>) -> Result<(), String>;

/// A fuzzer by name.
#[derive(Debug, Clone, Copy)]
pub struct Fuzzer {
    /// What `--only` takes.
    pub name: &'static str,
    /// Which code it tries.
    pub door: &'static str,
    /// The body.
    pub run: Fuzz,
}

/// Every fuzzer, in the order in which they run.
pub const FUZZERS: [Fuzzer; 8] = [
    Fuzzer {
        name: "lives",
        door: "lives of caches, decoded by the reference and every instruction set",
        run: lives::fuzz,
    },
    Fuzzer {
        name: "views",
        door: "views through strides, scales and codes",
        run: views::fuzz,
    },
    Fuzzer {
        name: "convert",
        door: "convert::import, export, dequantize; PageLayout",
        run: convert::fuzz,
    },
    Fuzzer {
        name: "states",
        door: "AttnState and its merge",
        run: states::fuzz,
    },
    Fuzzer {
        name: "files",
        door: "readers of safetensors and page files",
        run: files::fuzz,
    },
    Fuzzer {
        name: "program",
        door: "attn quantize, dequantize, run as a program",
        run: program::fuzz,
    },
    Fuzzer {
        name: "wgsl",
        door: "the WGSL preprocessor",
        run: wgsl::fuzz,
    },
    Fuzzer {
        name: "sizes",
        door: "problems, configs, views and calls with extreme numbers",
        run: sizes::fuzz,
    },
];

/// Fails a fuzzer with a text unless a condition holds.
#[macro_export]
macro_rules! hold {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

/// Whether a fuzzer finds a wrong subject within `inputs` of its inputs, by one that holds for the right subject.
#[cfg(test)]
fn finds(
    inputs: u64,
    right: impl Fn(&mut Unstructured<'_>) -> Result<(), String>,
    wrong: impl Fn(&mut Unstructured<'_>) -> Result<(), String>,
) -> bool {
    (0..inputs).any(|seed| {
        let bytes = draw::input(seed);
        let holds = |subject: &dyn Fn(&mut Unstructured<'_>) -> Result<(), String>| {
            subject(&mut Unstructured::new(&bytes)).is_ok()
        };
        !holds(&wrong) && holds(&right)
    })
}
