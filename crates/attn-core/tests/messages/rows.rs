//! Rows in host memory, on a device, and of other caches.

use std::any::Any;

use attn_core::{
    DeviceMemory, Dtype, Error, KvFormat, KvView, PageLayout, Rows, RowsMut, Scheme, StridedRows,
    all_on_device,
    convert::{ExternalRows, RowFormat, import, rows::q8_0_row},
};

use crate::calls::*;

/// A token's numbers on a device.
#[derive(Debug)]
struct There(&'static str);

impl DeviceMemory for There {
    fn elements(&self) -> usize {
        ROW
    }
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn device(&self) -> String {
        self.0.to_owned()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Why the host does not append a token that is on a device.
fn append_on(memory: &There) -> Error {
    let k = Rows::on_device(memory, [1, 1, 1, DIM], [0, DIM, DIM]).unwrap();
    let mut cache = filled("int8", 0);
    cache.append(0, k, &[0.5; ROW]).unwrap_err()
}

pub fn rows() -> Vec<Refusal> {
    let (x, mut out) = ([0.5f32; 200], [0.5f32; 200]);
    let layout = PageLayout::new(KvFormat::same(Scheme::F16), DIM, 16, 1).unwrap();
    let codes = [0u8; 3 * 2 * ROW];
    let external = |scheme, tokens: usize| ExternalRows {
        format: RowFormat::Plain(scheme),
        rows: StridedRows::bnsh(&codes, &[], 1, tokens, 2 * ROW, 0),
        blocks: None,
    };
    let imported = |scheme| {
        import(
            &layout,
            0,
            3,
            &external(scheme, 3),
            &external(Scheme::F16, 3),
        )
        .unwrap_err()
    };
    let mut q8 = [0; 34];
    let view = |format: KvFormat| {
        let rows = StridedRows::bnsh(&codes, &[], 1, 3, 2 * ROW, 0);
        KvView::new(&problem(&[4]), format, rows, rows, [&[], &[]]).unwrap_err()
    };
    vec![
        (
            "rows that end behind their slice",
            Rows::strided(&x, [4, 1, DIM], [DIM, DIM]).unwrap_err(),
        ),
        (
            "results that overlap",
            RowsMut::strided(&mut out, [3, 1, DIM], [32, DIM]).unwrap_err(),
        ),
        (
            "K on a GPU, in a call of the host's",
            append_on(&There("cuda:1")),
        ),
        (
            "K on a GPU, and V in host memory",
            all_on_device(&[("k", Some(&There("cuda:0"))), ("v", None)]).unwrap_err(),
        ),
        ("rows of bf16 for pages of f16", imported(Scheme::Bf16)),
        ("plain rows of int4", imported(Scheme::Int4(1))),
        (
            "a q8_0 row of 20 elements",
            q8_0_row(&x[..20], &mut q8).unwrap_err(),
        ),
        (
            "a q8_0 row with infinity",
            q8_0_row(&[f32::INFINITY; 32], &mut q8).unwrap_err(),
        ),
        (
            "a q8_0 row of 1e38",
            q8_0_row(&[1e38; 32], &mut q8).unwrap_err(),
        ),
        ("a view of int4", view(KvFormat::INT4)),
        (
            "a view that is too short",
            view(KvFormat::same(Scheme::F16)),
        ),
    ]
}
