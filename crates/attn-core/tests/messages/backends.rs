//! What only backends find.

use attn_core::{Error, HostPages, KvCache, Unsupported};

use crate::calls::*;

/// What only backends find: their fields are examples.
pub fn backends() -> Vec<Refusal> {
    let store = HostPages::new(&config("int4")).unwrap();
    let unsupported = [
        Unsupported::Absent {
            backend: "cuda",
            reason: "no NVIDIA driver was found".into(),
            next_step: "install the driver, or use backend \"cpu\"".into(),
        },
        Unsupported::NotBuilt { backend: "wgpu" },
        Unsupported::NoKernel {
            backend: "wgpu",
            what: "head_dim 256 in f16".into(),
            built: "head_dims up to 192".into(),
        },
        Unsupported::Undefined {
            backend: "cuda",
            reason: problem(&[1]).softcap(0.0).check().unwrap_err().to_string(),
        },
        Unsupported::Forked,
    ];
    let shard = problem(&[1024])
        .tokens_after([5])
        .check_whole("wgpu")
        .unwrap_err();
    let names: Vec<_> = unsupported
        .iter()
        .map(|reason| reason.variant().0)
        .collect();
    let all: Vec<_> = Unsupported::VARIANTS.iter().map(|row| row.0).collect();
    assert_eq!(names, all, "an example for each variant of Unsupported");
    let (mut fp8, of_ones) = (config("fp8"), HostPages::new(&config("fp8")).unwrap());
    fp8.v_tensor_scales[0] = 0.5;
    let mut list = vec![
        (
            "a store of another format than the config's",
            KvCache::new(config("int8"), Box::new(store)).err().unwrap(),
        ),
        (
            "a store of other static scales than the config's",
            KvCache::new(fp8, Box::new(of_ones)).err().unwrap(),
        ),
        (
            "a cache of another backend",
            Error::WrongBackend {
                backend: "cuda",
                what: "cache",
            },
        ),
        (
            "a failure of the device, with its own error behind it",
            Error::Device {
                backend: "cuda",
                doing: "copying the results",
                source: "CUDA_ERROR_LAUNCH_FAILED".into(),
            },
        ),
        (
            "a shard, on a backend that takes whole sequences",
            shard.into(),
        ),
    ];
    list.extend(
        unsupported.map(|reason| ("a backend that is absent, or has no kernel", reason.into())),
    );
    list
}
