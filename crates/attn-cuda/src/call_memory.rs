//! What calls keep on a GPU from one to the next: their lists, a workspace, and the memory that host rows are copied to.

use attn_core::Error;
use cudarc::driver::{CudaEvent, DriverError, result, sys};

use crate::{
    device::Device,
    error::failed,
    handles::{DeviceAddress, Stream},
    staging::{DeviceLists, Lists, Scratch, Staging},
};

/// The memory of calls that are ordered among themselves, on whatever streams.
///
/// Each call records [`CallMemory::end`] behind its work, or waits for it; the stream of the next one waits for that ([`CallMemory::begin`]).
#[derive(Debug)]
pub(crate) struct CallMemory {
    staging: Staging,
    /// Slots and residual pages of an append.
    slots: Scratch,
    /// Lengths, page tables and the problem's lists of an attention.
    lists: DeviceLists,
    workspace: Scratch,
    /// Bytes at the workspace's start that are zero once the calls before have run.
    zeroed: usize,
    /// Recorded behind the latest call.
    done: CudaEvent,
}

impl CallMemory {
    /// No memory so far.
    pub(crate) fn new(device: &Device) -> Result<Self, DriverError> {
        Ok(CallMemory {
            staging: Staging::default(),
            slots: Scratch::default(),
            lists: DeviceLists::default(),
            workspace: Scratch::default(),
            zeroed: 0,
            done: device.context.new_event(None)?,
        })
    }

    /// Lets work that comes on `stream` wait for the calls so far.
    ///
    /// # Safety
    /// `stream` is a live stream of the device's context, which is current.
    pub(crate) unsafe fn begin(&self, stream: Stream) -> Result<(), Error> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is this value's; the stream by this function's contract.
        unsafe { result::stream::wait_event(stream.raw(), self.done.cu_event(), flags) }
            .map_err(failed("ordering calls"))
    }

    /// Records that the call's work ends here.
    ///
    /// # Safety
    /// Those of [`CallMemory::begin`].
    pub(crate) unsafe fn end(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the event is this value's; the stream by this function's contract.
        unsafe { result::event::record(self.done.cu_event(), stream.raw()) }
            .map_err(failed("recording the end of a call"))
    }

    /// Waits for the calls so far.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        let done = self.done.synchronize();
        done.map_err(failed("waiting for calls"))
    }

    /// The device's copy of the lists of an append.
    ///
    /// # Safety
    /// Those of [`CallMemory::begin`], which has been called for `stream` or needs not to be, since each call before was waited for.
    pub(crate) unsafe fn slots(
        &mut self,
        device: &Device,
        lists: &Lists,
        stream: Stream,
    ) -> Result<DeviceAddress, Error> {
        let (bytes, done) = (lists.bytes(), &self.done);
        let (base, _) = self.slots.room(device, done, bytes.len())?;
        // SAFETY: `room` has given as many bytes; `done` is behind every earlier copy, or that was waited for; the rest is this function's contract.
        unsafe { self.staging.copy(device, done, bytes, base, stream.raw()) }
            .map_err(failed("copying an append's slots"))?;
        Ok(base)
    }

    /// The device's copy of the lists of an attention.
    ///
    /// # Safety
    /// Those of [`CallMemory::slots`].
    pub(crate) unsafe fn lists(
        &mut self,
        device: &Device,
        lists: &Lists,
        stream: Stream,
    ) -> Result<DeviceAddress, Error> {
        let (staging, done) = (&mut self.staging, (device, &self.done));
        // SAFETY: this function's contract; `done` as for `slots`.
        unsafe { self.lists.write(staging, done, lists, stream.raw()) }
    }

    /// The workspace of a launch, `bytes` long, of which the first `zeroed` are zero. [`CallMemory::left_zero`] follows the launch.
    ///
    /// # Safety
    /// Those of [`CallMemory::slots`].
    pub(crate) unsafe fn workspace(
        &mut self,
        device: &Device,
        [bytes, zeroed]: [usize; 2],
        stream: Stream,
    ) -> Result<DeviceAddress, Error> {
        let (at, is_new) = self.workspace.room(device, &self.done, bytes)?;
        // A launch that fails leaves anything.
        let known = std::mem::take(&mut self.zeroed);
        let (known, zeroed) = (if is_new { 0 } else { known }, zeroed.min(bytes));
        if known < zeroed {
            // SAFETY: `room` has given as many bytes; the stream by this function's contract.
            unsafe { result::memset_d8_async(at.get(), 0, zeroed, stream.raw()) }
                .map_err(failed("zeroing a workspace"))?;
        }
        Ok(at)
    }

    /// The launch with the workspace, which leaves its first `bytes` zero, is enqueued.
    pub(crate) fn left_zero(&mut self, bytes: usize) {
        self.zeroed = bytes;
    }
}

/// The memory of calls with rows in host memory, on the device's own stream. Each waits for its work, so the lock is held by one that runs alone.
#[derive(Debug)]
pub(crate) struct HostCalls {
    pub(crate) memory: CallMemory,
    /// The call's rows.
    rows: Scratch,
}

impl HostCalls {
    /// No memory so far.
    pub(crate) fn new(device: &Device) -> Result<Self, DriverError> {
        Ok(HostCalls {
            memory: CallMemory::new(device)?,
            rows: Scratch::default(),
        })
    }

    /// `bytes` of device memory for the call's rows.
    pub(crate) fn rows(&mut self, device: &Device, bytes: usize) -> Result<DeviceAddress, Error> {
        let (at, _) = self.rows.room(device, &self.memory.done, bytes)?;
        Ok(at)
    }
}
