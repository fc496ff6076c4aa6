//! A whole door in one file: attention over a cache for tensors that come as DLPack, in host memory or in that of a CUDA device.
//!
//! A door makes rows of its arrays and hands errors on. What is checked, planned, copied and waited for is the [`Session`]'s.
//! `cargo run --release -p attn-kv --example dlpack` attends tensors in host memory, and compares the bits with those of slices.

use std::{ffi::c_void, ptr::null, slice, sync::Arc};

use attn::{
    Append, Attend, AttendRows, CacheConfig, DecodeAttention, Device, Dtype, Error, Heads,
    KvFormat, Rows, RowsMut, Session,
};
use half::{bf16, f16};

/// `DLTensor`: the device's kind and number, the type's code, bits and lanes, the shape, and strides in elements or null for a tensor without gaps.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const CPU: i32 = 1;
const CUDA: i32 = 2;

/// A tensor `[tokens, heads, dim]` whose dims lie side by side.
struct Tensor {
    address: *mut c_void,
    dtype: Dtype,
    shape: [usize; 3],
    strides: [usize; 2],
    /// From the first number to the end of the last row.
    elements: usize,
    /// On a device, what its rows borrow.
    #[cfg(feature = "cuda")]
    memory: Option<attn::backends::cuda::CudaMemory>,
}

fn refuse<T>(
    what: &'static str,
    given: impl std::fmt::Debug,
    allowed: &'static str,
) -> Result<T, Error> {
    Err(Error::parameter(what, format_args!("{given:?}"), allowed))
}

impl Tensor {
    /// # Safety
    /// The tensor is a valid one of DLPack whose memory outlives this value and, on a device, the work that calls with it enqueue on `stream`, a live stream of
    /// that device's primary context. Nothing else writes it meanwhile, nor reads it where calls write.
    unsafe fn new(from: &DlTensor, stream: *mut c_void) -> Result<Self, Error> {
        let dtype = match (from.code, from.bits, from.lanes) {
            (2, 32, 1) => Dtype::F32,
            (2, 16, 1) => Dtype::F16,
            (4, 16, 1) => Dtype::Bf16,
            given => return refuse("type", given, "f32, f16 or bf16"),
        };
        if from.ndim != 3 {
            return refuse("ndim", from.ndim, "3: [tokens, heads, dim]");
        }
        // SAFETY: a valid tensor has as many sizes as dimensions.
        let shape = unsafe { slice::from_raw_parts(from.shape, 3) };
        let packed = [shape[1].saturating_mul(shape[2]), shape[2], 1];
        let strides = match from.strides.is_null() {
            true => &packed,
            // SAFETY: and as many strides.
            false => unsafe { slice::from_raw_parts(from.strides, 3) },
        };
        let sizes = |numbers: &[i64]| match numbers {
            &[a, b, c] if a.min(b).min(c) >= 0 => Ok([a as usize, b as usize, c as usize]),
            _ => refuse("shape or strides", numbers, "0 or more"),
        };
        let (shape, [of_token, of_head, of_dim]) = (sizes(shape)?, sizes(strides)?);
        if of_dim != 1 {
            return refuse("stride of the dims", of_dim, "1: dims lie side by side");
        }
        let to_last = |n: usize, stride: usize| n.saturating_sub(1).saturating_mul(stride);
        let last = to_last(shape[0], of_token).saturating_add(to_last(shape[1], of_head));
        let elements = match shape.contains(&0) {
            true => 0,
            false => last.saturating_add(shape[2]),
        };
        let address = from.data.wrapping_byte_add(from.byte_offset as usize);
        let tensor = Tensor {
            address,
            dtype,
            shape,
            strides: [of_token, of_head],
            elements,
            #[cfg(feature = "cuda")]
            memory: (from.device[0] == CUDA).then(|| {
                use attn::backends::cuda::{CudaMemory, native};
                let at = native::DeviceAddress::new(address as u64);
                let stream = native::Stream::from_raw(stream);
                // SAFETY: this function's contract.
                unsafe {
                    CudaMemory::to_write(from.device[1] as usize, at, elements, dtype, stream)
                }
            }),
        };
        let _ = stream;
        match from.device[0] {
            CPU => Ok(tensor),
            CUDA if cfg!(feature = "cuda") => Ok(tensor),
            kind => refuse(
                "device",
                kind,
                "1 (host memory), or 2 (CUDA) with the feature cuda",
            ),
        }
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> Option<(&attn::backends::cuda::CudaMemory, [usize; 4], [usize; 3])> {
        let ([tokens, heads, dim], [of_token, of_head]) = (self.shape, self.strides);
        let memory = self.memory.as_ref()?;
        Some((memory, [1, tokens, heads, dim], [0, of_token, of_head]))
    }

    fn read(&self) -> Result<Rows<'_>, Error> {
        #[cfg(feature = "cuda")]
        if let Some((memory, shape, strides)) = self.on_device() {
            return Rows::on_device(memory, shape, strides);
        }
        let (at, n) = (self.address, self.elements);
        let (shape, strides) = (self.shape, self.strides);
        // SAFETY: the contract of `new`; an empty tensor may have no address.
        unsafe {
            match self.dtype {
                _ if n == 0 => Rows::strided(&[0f32; 0], shape, strides),
                Dtype::F32 => {
                    Rows::strided(slice::from_raw_parts(at.cast::<f32>(), n), shape, strides)
                }
                Dtype::F16 => {
                    Rows::strided(slice::from_raw_parts(at.cast::<f16>(), n), shape, strides)
                }
                Dtype::Bf16 => {
                    Rows::strided(slice::from_raw_parts(at.cast::<bf16>(), n), shape, strides)
                }
            }
        }
    }

    fn write(&mut self) -> Result<RowsMut<'_>, Error> {
        #[cfg(feature = "cuda")]
        if let Some((memory, shape, strides)) = self.on_device() {
            return RowsMut::on_device(memory, shape, strides);
        }
        let (at, n) = (self.address, self.elements);
        let (shape, strides) = (self.shape, self.strides);
        // SAFETY: the same.
        unsafe {
            match self.dtype {
                _ if n == 0 => RowsMut::strided(&mut [0f32; 0], shape, strides),
                Dtype::F32 => RowsMut::strided(
                    slice::from_raw_parts_mut(at.cast::<f32>(), n),
                    shape,
                    strides,
                ),
                Dtype::F16 => RowsMut::strided(
                    slice::from_raw_parts_mut(at.cast::<f16>(), n),
                    shape,
                    strides,
                ),
                Dtype::Bf16 => RowsMut::strided(
                    slice::from_raw_parts_mut(at.cast::<bf16>(), n),
                    shape,
                    strides,
                ),
            }
        }
    }
}

fn main() -> Result<(), Error> {
    let heads = Heads::new(4, 2, 64);
    let config = CacheConfig::builder(KvFormat::INT8, heads)
        .max_len(64)
        .build();
    let device: Arc<dyn DecodeAttention> = Device::best()?.into();
    let appends = [Append {
        sequence: 0,
        tokens: 3,
    }];
    let at = Attend {
        q_lens: Some(&[2]),
        ..Attend::new(heads.q, &[0])
    };

    // Three tokens of a fused projection: 4 heads of Q, 2 of K, 2 of V; the two newest attend.
    let mut fused: Vec<f32> = (0..3 * 8 * 64)
        .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
        .collect();
    let mut out = vec![0f32; 2 * 4 * 64];
    let tensor = |data: &mut [f32], shape: &[i64; 3], strides: *const i64| DlTensor {
        data: data.as_mut_ptr().cast(),
        device: [CPU, 0],
        ndim: 3,
        code: 2,
        bits: 32,
        lanes: 1,
        shape: shape.as_ptr(),
        strides,
        byte_offset: 0,
    };
    let (of_kv, of_q, strides) = ([3, 2, 64], [2, 4, 64], [8 * 64, 64, 1]);
    let k = tensor(&mut fused[4 * 64..], &of_kv, strides.as_ptr());
    let v = tensor(&mut fused[6 * 64..], &of_kv, strides.as_ptr());
    let q = tensor(&mut fused[8 * 64..], &of_q, strides.as_ptr());
    let to = tensor(&mut out, &of_q, null());
    let mut session = Session::new(device.clone(), &config)?;
    // SAFETY: the tensors name the vectors above, which outlive the calls, and of which calls write `out` alone.
    let [k, v, q, to] =
        unsafe { [k, v, q, to].map(|t| Tensor::new(&t, null::<c_void>().cast_mut())) };
    let (k, v, q, mut to) = (k?, v?, q?, to?);
    session.append(&appends, k.read()?, v.read()?)?;
    session.attend(&at, AttendRows::new(q.read()?, to.write()?))?;

    let mut expected = vec![0f32; 2 * 4 * 64];
    let mut session = Session::new(device, &config)?;
    let rows = |head: usize, n: usize| Rows::strided(&fused[head * 64..], [n, 2, 64], [8 * 64, 64]);
    session.append(&appends, rows(4, 3)?, rows(6, 3)?)?;
    let q = Rows::strided(&fused[8 * 64..], [2, 4, 64], [8 * 64, 64])?;
    session.attend(&at, AttendRows::new(q, &mut expected))?;
    assert!(out.iter().any(|x| *x != 0.0), "nothing was written");
    assert_eq!(
        out, expected,
        "DLPack's tensors and slices of the same numbers differ"
    );
    println!("the same {} bits by both ways", 32 * out.len());
    Ok(())
}

#[test]
fn tensors_and_slices_have_the_same_bits() {
    main().unwrap();
}
