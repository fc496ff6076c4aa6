//! A backend that spoils the answers of the CPU, for tests of what the program says of one; and the program with it.

use attn::{
    BackendId, CacheConfig, DecodeAttention, DecodeStep, DeviceInfo, Error, KvCache, KvFormat,
    Plan, Problem, Selection, StepOutputs, Unsupported, problem::HEAD_DIMS,
};
use attn_cpu::CpuBackend;
use clap::Parser;

use crate::{
    Args,
    console::Console,
    program::{Backends, ending, run},
};

/// Changes outputs and log-sum-exps.
pub type Fault = fn(&mut [f32], &mut [f32]);

/// The CPU with a fault.
pub struct Faulty {
    inner: CpuBackend,
    fault: Fault,
}

impl Faulty {
    /// The faulty backend, as opening it gives it.
    pub fn open(fault: Fault) -> Box<dyn DecodeAttention> {
        let inner = CpuBackend::open().expect("the CPU is there");
        Box::new(Faulty { inner, fault })
    }

    /// A selection of a sound backend after CUDA's was absent.
    pub fn after_another() -> Selection {
        let absent = Unsupported::Absent {
            backend: "cuda",
            reason: "none".to_owned(),
            next_step: "use another".to_owned(),
        };
        let mut selection = Faulty::select(|_, _| ());
        selection.refused.push((BackendId::Cuda, absent));
        selection
    }

    /// A selection of the faulty backend.
    pub fn select(fault: Fault) -> Selection {
        Selection::new(BackendId::Cpu, Faulty::open(fault))
    }
}

impl DecodeAttention for Faulty {
    fn device(&self) -> &DeviceInfo {
        self.inner.device()
    }

    /// `attn check` holds emulated devices to the reduced table.
    fn is_software(&self) -> bool {
        true
    }

    fn supports(&self, problem: &Problem, format: KvFormat) -> Result<(), Unsupported> {
        if !HEAD_DIMS.contains(&problem.head_dim) {
            return Err(Unsupported::NoKernel {
                backend: "cpu",
                what: format!("head_dim {}", problem.head_dim),
                built: "others".to_owned(),
            });
        }
        self.inner.supports(problem, format)
    }

    fn create_cache(&self, config: &CacheConfig) -> Result<KvCache, Error> {
        self.inner.create_cache(config)
    }

    fn plan(&self, problem: &Problem, format: KvFormat) -> Result<Plan, Error> {
        self.inner.plan(problem, format)
    }

    fn execute(&self, step: &mut DecodeStep<'_>) -> Result<(), Error> {
        self.inner.execute(step)?;
        let StepOutputs { out, lse, .. } = step.parts().1;
        let out = out.into_contiguous();
        let out = out.expect("the program gives contiguous rows");
        (self.fault)(out, lse.unwrap_or_default());
        Ok(())
    }
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
