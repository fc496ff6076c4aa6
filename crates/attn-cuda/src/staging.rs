//! The way of numbers from the host to the device: device memory that calls reuse, page-locked host memory from which their lists are copied without a
//! wait, and parts of device memory that are copied from the caller's own.

use std::ops::Range;

use attn_core::{
    Error,
    error::{refuse, reserve},
};
use attn_kernels::cuda::params::QueryBlock;
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
        let grow = |old: &mut Option<CudaSlice<u8>>| -> Result<CudaSlice<u8>, DriverError> {
            // The old memory is freed on the device's own stream, which knows nothing of the caller's.
            done.synchronize()?;
            *old = None;
            let no_room = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            let bytes = bytes.max(1 << 16).checked_next_power_of_two();
            // SAFETY: whoever asked for the memory writes what a kernel then reads.
            let slice = unsafe { device.stream.alloc(bytes.ok_or(no_room)?) }?;
            device.stream.synchronize()?;
            Ok(slice)
        };
        let slice = grow(&mut self.0).map_err(failed("allocating for a call"))?;
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
        if bytes.is_empty() {
            return Ok(());
        }
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

/// Where a list lies among others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListPlace {
    offset: usize,
    is_empty: bool,
}

impl ListPlace {
    /// The address of the list on a device whose memory has the lists from `base` on; null for an empty one.
    pub(crate) fn at(self, base: DeviceAddress) -> DeviceAddress {
        base.offset(self.offset).given(!self.is_empty)
    }
}

impl Lists {
    /// Adds a list, behind the others at a multiple of 16 bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn add<T: Words>(&mut self, list: &[T]) -> Result<ListPlace, Error> {
        let (offset, bytes) = (self.0.len(), bytes_of(list));
        reserve(
            "a call's lists",
            &mut self.0,
            bytes.len().saturating_add(15),
        )?;
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        let is_empty = list.is_empty();
        Ok(ListPlace { offset, is_empty })
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
                .map_err(failed("copying a call's lists"))?;
        }
        latest.clear();
        reserve("a call's lists", &mut latest, bytes.len())?;
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

/// Parts of one piece of device memory, each aligned to 256 bytes; some are copied there from the caller's own memory.
#[derive(Default)]
pub(crate) struct Parts<'a> {
    copies: Vec<(usize, &'a [u8])>,
    bytes: usize,
}

impl<'a> Parts<'a> {
    /// The offset of a part of so many bytes.
    ///
    /// # Errors
    /// [`Error::Parameter`] if all parts together need more than 64 bits.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Result<usize, Error> {
        let at = self.bytes;
        let end = at.checked_add(bytes);
        let Some(end) = end.and_then(|end| end.checked_next_multiple_of(256)) else {
            let (given, allowed) = (
                format_args!("{at} + {bytes}"),
                "less than 2^64; decode fewer sequences at once",
            );
            return refuse("bytes of device memory", given, allowed);
        };
        self.bytes = end;
        Ok(at)
    }

    /// The offset of a part to copy.
    ///
    /// # Errors
    /// Those of [`Parts::reserve`].
    pub(crate) fn add<T: Words>(&mut self, part: &'a [T]) -> Result<usize, Error> {
        let at = self.reserve(size_of_val(part))?;
        self.copies.push((at, bytes_of(part)));
        Ok(at)
    }

    /// Bytes of all parts.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Enqueues the copies to `base` and behind.
    ///
    /// # Safety
    /// From `base` on there are [`Parts::bytes`] bytes of device memory until the copies have run on `stream`, which is alive; what is copied
    /// stays as it is until then. The driver may return before: it does where the host's memory is pinned.
    pub(crate) unsafe fn copy(
        &self,
        base: DeviceAddress,
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        for (offset, bytes) in self.copies.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            // SAFETY: this function's contract; `reserve` gave the part its own place below `bytes`.
            unsafe { result::memcpy_htod_async(base.offset(*offset).get(), bytes, stream) }?;
        }
        Ok(())
    }
}

/// Numbers without padding, which any bytes are.
pub(crate) trait Words: Copy {}
impl Words for f32 {}
impl Words for i32 {}
impl Words for i64 {}
impl Words for u32 {}
impl Words for u16 {}
impl Words for u8 {}
impl Words for QueryBlock {}

/// A slice's memory as bytes.
fn bytes_of<T: Words>(x: &[T]) -> &[u8] {
    // SAFETY: `Words` are plain numbers without padding, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
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
        let base = DeviceAddress::new(0x100);
        let at = [&[1u8; 3][..], &[], &[2; 16], &[3; 17]]
            .map(|list| lists.add(list).unwrap().at(base).get());
        assert_eq!(at, [0x100, 0, 0x110, 0x120]);
        assert_eq!(lists.bytes().len(), 64);
        assert_eq!(lists.bytes()[..4], [1, 1, 1, 0]);
        let words = lists.add(&[0x0102_0304u32, 5]).unwrap();
        assert_eq!(words.at(base).get(), 0x140);
        assert_eq!(lists.bytes()[64..72], [4, 3, 2, 1, 5, 0, 0, 0]);
    }

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut parts = Parts::default();
        let all = [&[1u8; 3][..], &[], &[2; 256], &[3; 257]];
        let at: Vec<usize> = all.iter().map(|part| parts.add(part).unwrap()).collect();
        assert_eq!(at, [0, 256, 256, 512]);
        assert_eq!(parts.bytes(), 1024);
    }

    #[test]
    fn parts_that_no_memory_holds_are_refused() {
        for bytes in [usize::MAX, usize::MAX - 512] {
            let mut parts = Parts::default();
            parts.reserve(512).unwrap();
            assert!(matches!(parts.reserve(bytes), Err(Error::Parameter { .. })));
            assert_eq!(parts.bytes(), 512, "nothing is reserved");
        }
    }
}
