//! What the tests of all files share.
#![allow(dead_code, reason = "each file uses a part")]

use std::{ffi::CStr, ptr};

use attn_c::*;

pub const HEADS: usize = 2;
pub const DIM: usize = 64;
pub const ROW: usize = HEADS * DIM;

pub fn last_error() -> String {
    // SAFETY: the text is this thread's, and no call fails meanwhile.
    unsafe { CStr::from_ptr(attn_last_error()) }
        .to_str()
        .expect("sentences are UTF-8")
        .to_owned()
}

#[track_caller]
pub fn refused(status: Status, expected: Status, sentence: &str) {
    let said = last_error();
    assert_eq!(status, expected, "{said}");
    assert!(said.contains(sentence), "{said:?} lacks {sentence:?}");
}

pub fn config() -> CacheConfig {
    CacheConfig {
        struct_size: size_of::<CacheConfig>(),
        format: c"int8".as_ptr(),
        kv_heads: HEADS,
        head_dim: DIM,
        v_dim: 0,
        sequences: 2,
        max_tokens: 128,
        pages: 0,
        page_size: 0,
        max_q_len: 0,
        k_scales: ptr::null(),
        v_scales: ptr::null(),
        layers: 0,
        q_heads: 0,
        centres: 0,
        checkpoints: 0,
    }
}

pub const PLAIN: Modifiers = Modifiers {
    scale: 0.0,
    softcap: 0.0,
    window: 0,
    chunk: 0,
    alibi_slopes: ptr::null(),
    sinks: ptr::null(),
    flags: 0,
};

pub fn tokens(k: &[f32], v: &[f32]) -> Tokens {
    Tokens {
        struct_size: size_of::<Tokens>(),
        k: k.as_ptr().cast(),
        v: v.as_ptr().cast(),
        dtype: Dtype::F32 as u32,
        k_token_stride: 0,
        v_token_stride: 0,
        k_head_stride: 0,
        v_head_stride: 0,
        rotary: ptr::null(),
    }
}

pub fn rows(q: &[f32], out: &mut [f32]) -> Rows {
    Rows {
        struct_size: size_of::<Rows>(),
        q: q.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        dtype: Dtype::F32 as u32,
        lse: ptr::null_mut(),
        q_token_stride: 0,
        q_head_stride: 0,
        out_token_stride: 0,
        out_head_stride: 0,
    }
}

/// A device and a cache on the CPU, destroyed with it.
pub struct Handles {
    pub device: *mut Device,
    pub cache: *mut Cache,
}

impl Handles {
    pub fn new() -> Self {
        Self::of(&config())
    }

    pub fn of(config: &CacheConfig) -> Self {
        let (mut device, mut cache) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the arguments are this function's own; so below, unless it says otherwise.
        unsafe {
            assert_eq!(attn_device_open(c"cpu".as_ptr(), &mut device), Status::Ok);
            assert_eq!(attn_cache_create(device, config, &mut cache), Status::Ok);
        }
        Handles { device, cache }
    }

    pub fn append(&self, appends: &[Append], tokens: &Tokens) -> Status {
        // SAFETY: as above.
        unsafe { attn_cache_append(self.cache, appends.as_ptr(), appends.len(), tokens) }
    }

    pub fn attend(&self, sequences: &[usize], modifiers: Modifiers, rows: &Rows) -> Status {
        self.attend_layer(0, sequences, modifiers, rows)
    }

    pub fn attend_layer(
        &self,
        layer: usize,
        sequences: &[usize],
        modifiers: Modifiers,
        rows: &Rows,
    ) -> Status {
        let step = Step {
            struct_size: size_of::<Step>(),
            q_heads: 2 * HEADS,
            count: sequences.len(),
            sequences: sequences.as_ptr(),
            q_lens: ptr::null(),
            modifiers,
            layer,
            pages: ptr::null(),
            page_counts: ptr::null(),
        };
        self.attend_step(&step, rows)
    }

    pub fn attend_step(&self, step: &Step, rows: &Rows) -> Status {
        // SAFETY: as above; the step's lists are those of its arrays.
        unsafe { attn_cache_attend(self.cache, step, rows) }
    }

    pub fn len(&self, sequence: usize) -> usize {
        let mut tokens = 0;
        // SAFETY: as above.
        let status = unsafe { attn_cache_tokens(self.cache, sequence, &mut tokens) };
        assert_eq!(status, Status::Ok);
        tokens
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe {
            attn_cache_destroy(self.cache);
            attn_device_close(self.device);
        }
    }
}

pub fn one(sequence: usize, tokens: usize) -> Append {
    Append { sequence, tokens }
}
