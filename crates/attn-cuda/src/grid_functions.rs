//! Whether the GPU's exponential and logarithm are what the integer arithmetic needs of them: found out from all of their inputs before a kernel
//! that uses them is loaded, once for each GPU, driver and compiler. Where they are not, kernels have polynomials.

use std::{ffi::c_void, path::Path, sync::PoisonError};

use attn_core::grid::{CHECKED_POINTS, CHECKED_SCALES, GridCheck};
use attn_kernels::cuda::{
    Exponential, Instance, Target, instance::Key, params::GridFunctionsParams,
};
use cudarc::driver::DevicePtr;

use crate::{device::Device, error::CudaError, image_cache, images};

/// Threads of a CTA of `grid_functions.cu`.
const THREADS: usize = 128;

impl Device {
    /// What an instance is compiled for.
    ///
    /// # Errors
    /// [`CudaError`] from the check of the GPU's functions, where the instance has a use for them.
    pub(crate) fn target(&self, instance: &Instance) -> Result<Target, CudaError> {
        let mut target = Target::from(self.arch);
        if instance.has_grid() {
            target.exponential = self.exponential()?;
        }
        Ok(target)
    }

    /// The same as far as it is known without the GPU: what most GPUs have, before a kernel has been loaded.
    pub(crate) fn known_target(&self) -> Target {
        let known = self.exponential.lock();
        let known = *known.unwrap_or_else(PoisonError::into_inner);
        Target {
            exponential: known.unwrap_or(Exponential::Instruction),
            ..Target::from(self.arch)
        }
    }

    /// Where integer kernels take powers of two from.
    fn exponential(&self) -> Result<Exponential, CudaError> {
        let known = self.exponential.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if let Some(exponential) = *known {
            return Ok(exponential);
        }
        let key = self.exponential_key();
        // A cache that must not be used costs the time of a check, nothing else.
        let folder = image_cache::folder().ok().flatten();
        let kept = folder.as_deref().and_then(|folder| kept(folder, &key));
        let exponential = match kept {
            Some(exponential) => exponential,
            None => {
                let found = self.first_right()?;
                if let Some(folder) = &folder {
                    let _ = image_cache::write_entry(folder, &key, found.name().as_bytes());
                }
                found
            }
        };
        Ok(*known.insert(exponential))
    }

    /// The first way to find powers of two that is right on this GPU.
    fn first_right(&self) -> Result<Exponential, CudaError> {
        let mut last = None;
        for exponential in Exponential::ALL {
            let check = self.compare(exponential)?;
            if check.is_right() {
                return Ok(exponential);
            }
            last = Some(check);
        }
        last.map_or(Ok(Exponential::Instruction), |check| {
            Err(CudaError::Exponential(check))
        })
    }

    /// Checks what integer kernels use, whatever the cache holds.
    pub(crate) fn check_exponential(&self) -> Result<GridCheck, CudaError> {
        self.compare(self.exponential()?)
    }

    /// Has the GPU give the functions' values for all inputs, and compares them.
    fn compare(&self, exponential: Exponential) -> Result<GridCheck, CudaError> {
        let target = Target {
            exponential,
            ..Target::from(self.arch)
        };
        let kernel = self.load_for(&Instance::GridFunctions, target, 0)?;
        let (num_points, num_scales) = (CHECKED_POINTS.count(), usize::from(CHECKED_SCALES));
        let values = self.stream.alloc_zeros::<f32>(num_points + num_scales)?;
        let points = values.device_ptr(&self.stream).0;
        let mut params = GridFunctionsParams {
            points,
            scales: points + 4 * num_points as u64,
            first_point: *CHECKED_POINTS.start(),
            num_points: num_points as i32,
            num_scales: num_scales as i32,
            reserved: 0,
        };
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        let ctas = [num_scales.div_ceil(THREADS), 1, 1];
        // SAFETY: `attn_grid_functions` takes this block, asserted on both sides, and writes as many numbers as `values` has; `load_for` has made the context
        // current, and `download` below waits for the stream, on which `values` is freed, too.
        unsafe { kernel.launch(self.stream.cu_stream(), ctas, THREADS, &mut arguments) }?;
        let mut found = vec![0f32; num_points + num_scales];
        self.download(&values, &mut found)?;
        let (points, scales) = found.split_at(num_points);
        Ok(GridCheck::of(points, scales))
    }

    /// What a result is kept under: it holds for a GPU, a driver, and the image that was run.
    fn exponential_key(&self) -> Key {
        let image = Instance::GridFunctions.key(images::sources(), self.arch);
        let mut hash = blake3::Hasher::new_derive_key("attn-cuda 2026-11 exponential of a GPU");
        hash.update(&image);
        hash.update(&self.version.to_le_bytes());
        hash.update(self.info.name.as_bytes());
        *hash.finalize().as_bytes()
    }
}

/// A result that the cache holds, if it is sound.
fn kept(folder: &Path, key: &Key) -> Option<Exponential> {
    let text = image_cache::read_entry(folder, key).ok().flatten()?;
    Exponential::from_name(std::str::from_utf8(&text).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_kept_for_its_key_alone() {
        let root = tempfile::tempdir().unwrap();
        let (folder, key) = (root.path().join("attn"), [3; 32]);
        assert_eq!(kept(&folder, &key), None);
        for exponential in Exponential::ALL {
            let name = exponential.name().as_bytes();
            image_cache::write_entry(&folder, &key, name).unwrap();
            assert_eq!(kept(&folder, &key), Some(exponential));
        }
        assert_eq!(kept(&folder, &[4; 32]), None);
        image_cache::write_entry(&folder, &key, b"neither").unwrap();
        assert_eq!(kept(&folder, &key), None);
    }
}
