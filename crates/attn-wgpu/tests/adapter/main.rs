//! What only an adapter can show. Without one all of it is ignored with the reason, or fails under `ATTN_REQUIRE`.

mod centres;
mod hostile;
mod lost;
mod native;
mod products;
mod tunings;

use std::process::ExitCode;

use attn_conformance::trials::Trials;
use attn_wgpu::WgpuBackend;
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Trials::new("wgpu", WgpuBackend::open());
    for add in [
        centres::add,
        hostile::add,
        lost::add,
        native::add,
        products::add,
        tunings::add,
    ] {
        trials = add(trials);
    }
    libtest_mimic::run(&arguments, trials.finish()).exit_code()
}
