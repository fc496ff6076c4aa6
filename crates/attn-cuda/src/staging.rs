//! Memory that a caller's stream needs at each step: device memory that steps reuse, and page-locked host memory from which their lists are
//! copied without a wait.

use std::ops::Range;

use attn_core::Error;
use cudarc::driver::{CudaEvent, CudaSlice, DevicePtr, DriverError, PinnedHostSlice, result, sys};

use crate::{device::Device, error::failed, handles::DeviceAddress};

/// Device memory that steps reuse; grows, never shrinks.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Option<CudaSlice<u8>>);

impl Scratch {
    /// `bytes` of device memory, and whether they are new. `done` is recorded behind all work that uses what was there before.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn room(
        &mut self,
        device: &Device,
        done: &CudaEvent,
        bytes: usize,
    ) -> Result<(DeviceAddress, bool), Error> {
        let address =
            |slice: &CudaSlice<u8>| DeviceAddress::new(slice.device_ptr(&device.stream).0);
        if let Some(slice) = self.0.as_ref().filter(|slice| slice.len() >= bytes) {
            return Ok((address(slice), false));
        }
        let grow = || -> Result<CudaSlice<u8>, DriverError> {
            // The old memory is freed on the device's own stream, which knows nothing of the caller's.
            done.synchronize()?;
            let no_room = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            let bytes = bytes.max(1 << 16).checked_next_power_of_two();
            // SAFETY: whoever asked for the memory writes what a kernel then reads.
            let slice = unsafe { device.stream.alloc(bytes.ok_or(no_room)?) }?;
            device.stream.synchronize()?;
            Ok(slice)
        };
        self.0 = None;
        let slice = grow().map_err(failed("allocating for a step"))?;
        Ok((address(self.0.insert(slice)), true))
    }
}

/// A ring of page-locked host memory.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    memory: Option<PinnedHostSlice<u8>>,
    /// Where the next bytes go.
    next: usize,
}

/// Bytes of a ring that serves most steps.
const USUAL: usize = 1 << 20;

impl Staging {
    /// Enqueues the copy of `bytes` to device memory, and returns before it has run.
    ///
    /// # Safety
    /// From `to` on there are as many bytes of device memory until the copy has run on `stream`, a live stream of the device's context, which is
    /// current. `done` is recorded behind every earlier copy.
    pub(crate) unsafe fn copy(
        &mut self,
        device: &Device,
        done: &CudaEvent,
        bytes: &[u8],
        to: DeviceAddress,
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        let capacity = self.memory.as_ref().map_or(0, PinnedHostSlice::len);
        if capacity - self.next < bytes.len() {
            // Earlier copies may still read the ring.
            done.synchronize()?;
            self.next = 0;
            if capacity < bytes.len() {
                let no_room = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                let room = bytes.len().max(USUAL).checked_next_power_of_two();
                let room = room.ok_or(no_room)?;
                self.memory = None;
                // SAFETY: bytes are read where they have been written alone.
                self.memory = Some(unsafe { device.context.alloc_pinned_with_flags(room, 0) }?);
            }
        }
        let Some(memory) = &mut self.memory else {
            return Ok(());
        };
        let place = &mut memory.as_mut_slice()?[self.next..self.next + bytes.len()];
        place.copy_from_slice(bytes);
        // SAFETY: `to` by this function's contract; `place` stays as it is until `done` has been waited for.
        unsafe { result::memcpy_htod_async(to.get(), place, stream) }?;
        self.next = (self.next + bytes.len())
            .next_multiple_of(64)
            .min(memory.len());
        Ok(())
    }
}

/// Lists of numbers, one behind the other, which one copy takes to the device.
#[derive(Debug, Default)]
pub(crate) struct Lists(Vec<u8>);

impl Lists {
    /// Adds a list; returns its offset, a multiple of 16.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> usize {
        let at = self.0.len();
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        at
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Lists in device memory that differ little from step to step, or from layer to layer not at all.
#[derive(Debug, Default)]
pub(crate) struct DeviceLists {
    memory: Scratch,
    /// What the memory holds once the steps so far have run.
    latest: Vec<u8>,
}

impl DeviceLists {
    /// The address of the lists on the device; enqueues a copy of what differs from the step before. A copy takes the longer the more bytes it has.
    ///
    /// # Safety
    /// `stream` is a live stream of the device's context, which is current. `done` is recorded behind all that was enqueued before with these lists or this ring, and
    /// `stream` waits for it.
    pub(crate) unsafe fn write(
        &mut self,
        staging: &mut Staging,
        (device, done): (&Device, &CudaEvent),
        lists: &Lists,
        stream: sys::CUstream,
    ) -> Result<DeviceAddress, Error> {
        let bytes = lists.bytes();
        let (base, is_new) = self.memory.room(device, done, bytes.len())?;
        let mut latest = std::mem::take(&mut self.latest);
        if is_new {
            latest.clear();
        }
        let changed = changed_chunks(&latest, bytes);
        if !changed.is_empty() {
            let to = base.offset(changed.start);
            // SAFETY: `room` has given as many bytes; the rest is this function's contract.
            unsafe { staging.copy(device, done, &bytes[changed], to, stream) }
                .map_err(failed("copying a step's lists"))?;
        }
        latest.clear();
        latest.extend_from_slice(bytes);
        self.latest = latest;
        Ok(base)
    }
}

/// The bytes from the first to the last chunk of 16 that differ from those before; empty where none does.
fn changed_chunks(before: &[u8], now: &[u8]) -> Range<usize> {
    const CHUNK: usize = 16;
    let differs = |i: &usize| {
        let chunk = *i..(i + CHUNK).min(now.len());
        before.get(chunk.clone()) != now.get(chunk)
    };
    let starts = || (0..now.len()).step_by(CHUNK);
    match (starts().find(differs), starts().rev().find(differs)) {
        (Some(first), Some(last)) => first..(last + CHUNK).min(now.len()),
        _ => 0..0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_reaches_from_the_first_change_to_the_last() {
        let before: Vec<u8> = (0..64).collect();
        let with = |places: &[usize]| {
            let mut now = before.clone();
            places.iter().for_each(|&at| now[at] ^= 1);
            now
        };
        assert_eq!(changed_chunks(&before, &before), 0..0);
        assert_eq!(changed_chunks(&before, &with(&[3])), 0..16);
        assert_eq!(changed_chunks(&before, &with(&[17, 47])), 16..48);
        assert_eq!(changed_chunks(&before, &with(&[63])), 48..64);
        // Longer, shorter, the first.
        let longer = [&before[..], &[7; 32]].concat();
        assert_eq!(changed_chunks(&before, &longer), 64..96);
        assert_eq!(changed_chunks(&longer, &before), 0..0);
        assert_eq!(changed_chunks(&[], &before), 0..64);
        assert_eq!(changed_chunks(&before, &[]), 0..0);
        assert_eq!(
            changed_chunks(&[1; 17], &[[1; 17].as_slice(), &[2]].concat()),
            16..18
        );
    }

    #[test]
    fn lists_lie_one_behind_the_other_in_chunks_of_16_bytes() {
        let mut lists = Lists::default();
        let at = [&[1u8; 3][..], &[], &[2; 16], &[3; 17]].map(|list| lists.add(list));
        assert_eq!(at, [0, 16, 16, 32]);
        assert_eq!(lists.bytes().len(), 64);
        assert_eq!(lists.bytes()[..4], [1, 1, 1, 0]);
    }
}
