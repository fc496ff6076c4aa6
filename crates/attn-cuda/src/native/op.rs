//! Small launches: what one is, how its kernels are loaded, how it is enqueued. CONTRIBUTING.md says how to add one.

use std::{ffi::c_void, fmt::Debug, sync::Arc};

use attn_core::Error;
use attn_kernels::cuda::Instance;
use cudarc::driver::{DriverError, sys};

use super::{
    check::{Checked, check, check_kernel},
    grid::Grid,
};
use crate::handles::Stream;
use crate::{
    device::{Device, LoadedKernel},
    error::failed,
    gpu::CudaBackend,
};

/// A small launch: the addresses and numbers of one kernel's work. [`CudaBackend::prepare_op`] loads its kernels, [`CudaBackend::enqueue`] enqueues it.
///
/// The type's documentation has a part "Safety": what the caller of `enqueue` answers for.
///
/// # Safety
/// The entry of every instance takes one [`Op::Params`], and with a parameter block that [`Op::params`] gives for a shape, and [`Op::grid`] beside it, each
/// kernel of the shape keeps to the memory that the type documents.
pub unsafe trait Op: Copy + Debug + Send + Sync {
    /// What all launches by the same kernels have in common, such as the layout of a page.
    type Shape: Clone + Debug + Send + Sync;
    /// The kernels' parameter block.
    type Params: Copy;
    /// What the launch does, as errors of the device say it.
    const DOING: &'static str;
    /// Shared memory of a CTA in bytes, where the kernel's size of it is chosen by the host.
    const SHARED_BYTES: usize = 0;

    /// The kernels of launches of this shape, in the order of [`Op::kernel`].
    ///
    /// # Errors
    /// [`Error::Parameter`] for a shape that has none.
    fn instances(shape: &Self::Shape) -> Result<Vec<Instance>, Error>;

    /// Which of the instances this launch takes.
    fn kernel(&self) -> usize {
        0
    }

    /// The parameter block. Everything that the host can refuse is refused here.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    fn params(&self, shape: &Self::Shape) -> Result<Self::Params, Error>;

    /// The grid; an empty one where there is nothing to do. What has no room in a grid [`Op::params`] refuses.
    fn grid(&self, shape: &Self::Shape) -> Grid;

    /// What a checking launch ahead looks at; nothing for launches whose arrays hold no numbers to check.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    fn checked(&self, _shape: &Self::Shape) -> Result<Option<Checked>, Error> {
        Ok(None)
    }
}

/// The loaded kernels of launches of one shape.
#[derive(Debug, Clone)]
pub struct Prepared<O: Op> {
    shape: O::Shape,
    kernels: Vec<Arc<LoadedKernel>>,
    check: Option<Arc<LoadedKernel>>,
}

impl<O: Op> Prepared<O> {
    /// What the launches have in common.
    #[must_use]
    pub fn shape(&self) -> &O::Shape {
        &self.shape
    }
}

/// Loads the kernels of launches of this shape.
///
/// # Errors
/// Those of [`CudaBackend::prepare_op`].
pub(crate) fn prepare_op<O: Op>(device: &Device, shape: O::Shape) -> Result<Prepared<O>, Error> {
    let instances = O::instances(&shape)?;
    let load = |instance| device.kernel(instance, O::SHARED_BYTES);
    Ok(Prepared {
        kernels: instances.iter().map(load).collect::<Result<_, _>>()?,
        check: check_kernel(device)?,
        shape,
    })
}

/// Enqueues a launch.
///
/// # Safety
/// Those of [`CudaBackend::enqueue`]; the device's context is current.
pub(crate) unsafe fn enqueue<O: Op>(
    device: &Device,
    prepared: &Prepared<O>,
    stream: sys::CUstream,
    op: &O,
) -> Result<(), Error> {
    // SAFETY: this function's contract.
    unsafe { enqueue_as(device, prepared, stream, op, |params| params) }
}

/// Enqueues a launch whose parameter block `change` completes.
///
/// # Safety
/// Those of [`enqueue`]; the changed block asks of memory and of what is enqueued beside it only what the caller answers for.
pub(crate) unsafe fn enqueue_as<O: Op>(
    device: &Device,
    prepared: &Prepared<O>,
    stream: sys::CUstream,
    op: &O,
    change: impl FnOnce(O::Params) -> O::Params,
) -> Result<(), Error> {
    let shape = &prepared.shape;
    let grid = op.grid(shape);
    if grid.is_empty() {
        return Ok(());
    }
    // The checking launch reads what the host refuses where it is null, and what is refused enqueues nothing.
    let params = change(op.params(shape)?);
    let Some(kernel) = prepared.kernels.get(op.kernel()) else {
        let allowed = "one that prepare_op has loaded for the shape";
        return Err(Error::parameter("kernel", op.kernel(), allowed));
    };
    if let Some(check_kernel) = &prepared.check
        && let Some(checked) = op.checked(shape)?
    {
        // SAFETY: this function's contract.
        unsafe { check(device, check_kernel, stream, checked) }?;
    }
    // SAFETY: the kernel takes one `O::Params` by the trait's contract; the rest is this function's.
    unsafe { launch(kernel, stream, grid, params) }.map_err(failed(O::DOING))
}

/// Enqueues a kernel that takes one parameter block.
///
/// # Safety
/// The kernel takes a `P`, whose size and offsets are asserted in params.rs and params.h; what it does with the addresses in it is allowed until it has
/// run on `stream`, a live stream of the device's context, which is current.
pub(super) unsafe fn launch<P: Copy>(
    kernel: &LoadedKernel,
    stream: sys::CUstream,
    grid: Grid,
    mut params: P,
) -> Result<(), DriverError> {
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: this function's contract; `params` outlives the call, which copies it.
    unsafe { kernel.launch(stream, grid.ctas, grid.threads, &mut arguments) }
}

impl CudaBackend {
    /// Loads (at first compiles) the kernels of small launches of this shape, such as appends to pages of a layout; not for use inside a capture.
    ///
    /// ```no_run
    /// use attn_core::{Error, KvFormat, PageLayout};
    /// use attn_cuda::{
    ///     CudaBackend,
    ///     native::{CopyPagesArgs, ExportArgs, Prepared, Stream},
    /// };
    ///
    /// /// Rows from pages, and pages between pools.
    /// struct Transfer {
    ///     export: Prepared<ExportArgs>,
    ///     copy_pages: Prepared<CopyPagesArgs>,
    /// }
    ///
    /// impl Transfer {
    ///     fn new(gpu: &CudaBackend) -> Result<Self, Error> {
    ///         let layout = PageLayout::new(KvFormat::INT8, 128, 64, 8)?;
    ///         Ok(Transfer {
    ///             export: gpu.prepare_op(layout)?,
    ///             copy_pages: gpu.prepare_op(())?,
    ///         })
    ///     }
    ///
    ///     /// # Safety
    ///     /// `stream` is a live stream of the device's primary context, which is current; the rest is what [`CopyPagesArgs`] asks.
    ///     unsafe fn copy(&self, gpu: &CudaBackend, stream: Stream, args: &CopyPagesArgs) -> Result<(), Error> {
    ///         // SAFETY: this function's contract.
    ///         unsafe { gpu.enqueue(&self.copy_pages, stream, args) }
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Parameter`] for a shape that has no kernel, as the op's type says; [`Error::Device`].
    pub fn prepare_op<O: Op>(&self, shape: O::Shape) -> Result<Prepared<O>, Error> {
        self.device.bind()?;
        prepare_op(&self.device, shape)
    }

    /// Enqueues a small launch on the caller's stream. Allocates nothing, synchronizes nothing, and can be captured. A launch with nothing to do, such as one
    /// of no rows, does nothing, whatever its other arguments are.
    ///
    /// With `ATTN_CUDA=check=1` in the environment of [`CudaBackend::open`], a checking launch goes ahead of launches that read slots, lengths, pages or positions on the
    /// device, and is waited for, but in a capture.
    ///
    /// # Safety
    /// - As [`CudaBackend::decode_on`] for the stream, addresses and lifetimes.
    /// - What the op's type says in its part "Safety".
    ///
    /// # Errors
    /// [`Error::Parameter`] for numbers of more than 31 bits, and for what the op's type names; [`Error::Device`] with the driver's refusal, or with
    /// [`CudaError::Check`](crate::CudaError::Check).
    pub unsafe fn enqueue<O: Op>(
        &self,
        prepared: &Prepared<O>,
        stream: Stream,
        op: &O,
    ) -> Result<(), Error> {
        // SAFETY: this function's contract.
        unsafe { enqueue(&self.device, prepared, stream.raw(), op) }
    }
}

#[cfg(test)]
mod tests {
    use std::any::type_name;

    use attn_core::{KvFormat, PageLayout};
    use attn_kernels::cuda::params::QueryBlocksParams;

    use super::*;
    use crate::native::{
        AppendArgs, AppendShape, CopyPagesArgs, ExportArgs, ImportArgs, ListBlocksArgs,
        MergeSpansArgs, MergeStatesArgs, SlotAppendArgs, centre::CentreArgs, read::ReadArgs,
    };

    /// Whether the text of every kernel of the op declares an entry that takes its parameter block, and nothing else.
    fn takes_its_block<O: Op>(shape: O::Shape) {
        let block = type_name::<O::Params>().rsplit("::").next().unwrap();
        for instance in O::instances(&shape).unwrap() {
            let source = attn_kernels::CUDA
                .iter()
                .find(|(path, _)| *path == instance.source());
            let (path, text) = source.expect("a source of the tree");
            let (entry, signature) = (instance.entry(), "const __grid_constant__");
            let declared = format!(" {entry}({signature} {block} p) {{");
            assert!(text.contains(&declared), "{path} has no{declared}");
        }
    }

    #[test]
    fn the_kernels_of_an_op_take_its_parameter_block() {
        let layout = PageLayout::new(KvFormat::INT8, 128, 64, 2).unwrap();
        let plain = PageLayout::new("int8-plain".parse().unwrap(), 128, 64, 2).unwrap();
        let appends = AppendShape {
            layout,
            rotary: true,
        };
        takes_its_block::<AppendArgs>(appends);
        takes_its_block::<SlotAppendArgs>(appends);
        takes_its_block::<CentreArgs>(layout);
        takes_its_block::<ExportArgs>(layout);
        takes_its_block::<ImportArgs>(plain);
        takes_its_block::<CopyPagesArgs>(());
        takes_its_block::<MergeStatesArgs>(());
        takes_its_block::<MergeSpansArgs>((KvFormat::INT8, 128));
        takes_its_block::<ListBlocksArgs>(QueryBlocksParams::default());
        takes_its_block::<ReadArgs>(132);
    }

    #[test]
    fn a_grid_without_ctas_along_any_axis_is_empty() {
        let grid = |ctas| Grid::new(ctas, 128);
        assert!(!grid([1, 2, 3]).is_empty());
        for ctas in [[0, 2, 3], [1, 0, 3], [1, 2, 0]] {
            assert!(grid(ctas).is_empty());
        }
    }
}
