//! A backend that spoils the answers of the CPU, for tests of what the program says of one; and the program with it.

use attn::{BackendId, DecodeAttention, Selection, Unsupported};
use attn_conformance::fake::FakeBackend;
use attn_cpu::CpuBackend;
use clap::Parser;

use crate::{
    Args,
    console::Console,
    program::{Backends, ending, run},
};

/// Changes outputs and log-sum-exps.
pub type Fault = fn(&mut [f32], &mut [f32]);

/// The CPU with a fault, as opening it gives it. `attn check` holds it, as every program on the CPU, to the reduced table.
pub fn open(fault: Fault) -> Box<dyn DecodeAttention> {
    let cpu = FakeBackend::of(CpuBackend::open().expect("the CPU is there")).software();
    let cpu = cpu.with_refusals(|problem, _| {
        problem
            .head_dim
            .check()
            .is_err()
            .then(|| Unsupported::NoKernel {
                backend: "cpu",
                what: format!("head_dim {}", problem.head_dim),
                built: "others".to_owned(),
            })
    });
    Box::new(cpu.with_answers(move |answer| fault(answer.out, answer.lse)))
}

/// A selection of the faulty backend.
pub fn select(fault: Fault) -> Selection {
    Selection::new(BackendId::Cpu, open(fault))
}

/// A selection of a sound backend after CUDA's was absent.
pub fn select_after_another() -> Selection {
    let absent = Unsupported::Absent {
        backend: "cuda",
        reason: "none".to_owned(),
        next_step: "use another".to_owned(),
    };
    let mut selection = select(|_, _| ());
    selection.refused.push((BackendId::Cuda, absent));
    selection
}

/// Runs the program; its exit code, standard output and standard error.
pub fn program(args: &[&str], backends: &Backends) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = Args::try_parse_from([&["attn"], args].concat()).expect("the arguments are legal");
    let mut console = Console::new(&mut out, &mut err);
    let result = run(args, &mut console, backends);
    let code = ending::<Args>(result, &mut console);
    let text = |bytes| String::from_utf8(bytes).expect("the program prints UTF-8");
    (code, text(out), text(err))
}
