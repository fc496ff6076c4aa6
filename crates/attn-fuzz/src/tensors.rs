//! Safetensors files for the fuzzers of files: whole ones, and damaged ones.

use std::collections::BTreeMap;

use attn_core::KvFormat;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::draw::Draw;

/// A file whose header and data are kept apart, so that either can be damaged.
#[derive(Debug, Clone, Default)]
pub struct File {
    /// The JSON text.
    pub header: Vec<u8>,
    /// The tensors' bytes.
    pub data: Vec<u8>,
}

/// What a drawn file holds, while it is whole.
#[derive(Debug, Clone)]
pub struct Content {
    /// Layer names.
    pub names: Vec<String>,
    /// Tokens, KV heads, elements per head: of K, and of V.
    pub shapes: [[usize; 3]; 2],
    /// `F16`, `BF16` or `F32`.
    pub dtype: &'static str,
    /// Whether every value is finite.
    pub finite: bool,
}

impl File {
    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let len = (self.header.len() as u64).to_le_bytes();
        [&len[..], &self.header, &self.data].concat()
    }

    /// Takes a file apart.
    pub fn parse(bytes: &[u8]) -> Option<File> {
        let (len, rest) = bytes.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        let (header, data) = rest.split_at_checked(len)?;
        Some(File {
            header: header.to_vec(),
            data: data.to_vec(),
        })
    }

    /// The file without the checksum of pages, behind which damage would not be seen.
    #[must_use]
    pub fn without_checksum(mut self) -> File {
        let mut text = String::from_utf8_lossy(&self.header).into_owned();
        let key = "\"checksum\":\"";
        if let Some(start) = text.find(key)
            && let Some(len) = text[start + key.len()..].find("\",")
        {
            text.replace_range(start..start + key.len() + len + 2, "");
        }
        self.header = text.into_bytes();
        self
    }

    fn add(
        &mut self,
        entries: &mut Vec<String>,
        name: &str,
        dtype: &str,
        shape: &[usize],
        bytes: &[u8],
    ) {
        let (from, to) = (self.data.len(), self.data.len() + bytes.len());
        self.data.extend_from_slice(bytes);
        entries.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{from},{to}]}}"
        ));
    }

    /// A file with K and V of one or two layers, and, for `attn run`, the rest.
    pub fn draw(draw: &mut Draw<'_, '_>) -> (File, Content) {
        let heads = draw.range(1..=2);
        let most = if draw.once_in(3) { 140 } else { 20 };
        let tokens = draw.range(0..=most);
        let dims = match draw.range(0..=5) {
            // No head_dim of the library.
            0 => [5; 2],
            1 => draw.head_dim().both(),
            // Both sides like K's: a file of unlike ones may be refused before its pages are made.
            _ => [draw.head_dim().k; 2],
        };
        let shapes = dims.map(|dim| [tokens, heads, dim]);
        let dtype = draw.pick(&["F16", "BF16", "F32"]);
        let mut names = vec!["layer00".to_owned()];
        if draw.once_in(3) {
            names.push(
                draw.pick(&[
                    "attn",
                    "kv",
                    "page_size",
                    "checksum",
                    "layer",
                    "l.k",
                    "é",
                    "",
                ])
                .to_owned(),
            );
        }
        let finite = !draw.once_in(8) || tokens == 0;
        let mut file = File::default();
        let mut entries = Vec::new();
        if draw.once_in(2) {
            let scale = draw.pick(&["0.125", "1", "NaN", "-1", "1e99", "x", ""]);
            entries.push(format!("\"__metadata__\":{{\"scale\":\"{scale}\"}}"));
        }
        for (i, name) in names.iter().enumerate() {
            for (side, shape) in ["k", "v"].into_iter().zip(&shapes) {
                let n = shape.iter().product();
                let mut x = draw.noise(n, 3.0);
                if !finite && i == 0 {
                    let bad = draw.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
                    let at = draw.range(0..=n - 1);
                    x[at] = bad;
                }
                file.add(
                    &mut entries,
                    &format!("{name}.{side}"),
                    dtype,
                    shape,
                    &encode(dtype, &x),
                );
            }
            let q_heads = heads * draw.range(1..=2);
            let [q, out] = dims.map(|dim| [1, q_heads, dim]);
            for (side, shape) in [("q", &q[..]), ("out", &out[..]), ("lse", &q[..2])] {
                let x = draw.noise(shape.iter().product(), 1.0);
                file.add(
                    &mut entries,
                    &format!("{name}.{side}"),
                    "F32",
                    shape,
                    &encode("F32", &x),
                );
            }
        }
        file.header = format!("{{{}}}", entries.join(",")).into_bytes();
        let content = Content {
            names,
            shapes,
            dtype,
            finite,
        };
        (file, content)
    }

    /// Damages the header's text, the data or the whole; gives the file's bytes.
    pub fn damage(mut self, draw: &mut Draw<'_, '_>) -> Vec<u8> {
        for _ in 0..draw.range(1..=3) {
            match draw.range(0..=7) {
                0..=2 => self.replace_number(draw),
                3 => flip(draw, &mut self.header),
                4 => flip(draw, &mut self.data),
                5 => {
                    let left = draw.range(0..=self.data.len());
                    self.data.truncate(left);
                }
                6 => self.replace_word(draw),
                _ => {
                    let (a, b) = (draw.range(0..=self.header.len()), draw.range(0..=40));
                    let part = self.header[a..(a + b).min(self.header.len())].to_vec();
                    let at = draw.range(0..=self.header.len());
                    self.header.splice(at..at, part);
                }
            }
        }
        let mut bytes = self.bytes();
        match draw.range(0..=9) {
            0 => bytes[..8].copy_from_slice(&(draw.size() as u64).to_le_bytes()),
            1 => {
                let left = draw.range(0..=bytes.len());
                bytes.truncate(left);
            }
            2 => bytes.push(0),
            _ => {}
        }
        bytes
    }

    /// Puts another number in place of one of the header's.
    fn replace_number(&mut self, draw: &mut Draw<'_, '_>) {
        let starts: Vec<usize> = (0..self.header.len())
            .filter(|&i| {
                self.header[i].is_ascii_digit() && (i == 0 || !self.header[i - 1].is_ascii_digit())
            })
            .collect();
        if starts.is_empty() {
            return;
        }
        let start = draw.pick(&starts);
        let digits = self.header[start..]
            .iter()
            .take_while(|b| b.is_ascii_digit())
            .count();
        let number = match draw.range(0..=5) {
            0 => "-1".to_owned(),
            1 => "1e3".to_owned(),
            2 => "184467440737095516160".to_owned(),
            _ => draw.size().to_string(),
        };
        self.header
            .splice(start..start + digits, number.into_bytes());
    }

    /// Puts another word in place of a known one.
    fn replace_word(&mut self, draw: &mut Draw<'_, '_>) {
        const WORDS: [&str; 15] = [
            "F32",
            "F16",
            "BF16",
            "I64",
            "U8",
            "pages",
            "residual_",
            "k_scales",
            "\"k\"",
            "int8",
            "int4",
            "-w0",
            "fp8",
            "tokens",
            "layer00",
        ];
        let text = String::from_utf8_lossy(&self.header).into_owned();
        let (from, to) = (draw.pick(&WORDS), draw.pick(&WORDS));
        self.header = text.replacen(from, to, draw.range(1..=3)).into_bytes();
    }
}

fn flip(draw: &mut Draw<'_, '_>, bytes: &mut [u8]) {
    if !bytes.is_empty() {
        let at = draw.range(0..=bytes.len() - 1);
        bytes[at] ^= 1 << draw.range(0..=7);
    }
}

fn encode(dtype: &str, x: &[f32]) -> Vec<u8> {
    match dtype {
        "F16" => x
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect(),
        "BF16" => x
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// A tensor's values.
pub fn decoded(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let pair = |b: &[u8]| [b[0], b[1]];
    match dtype {
        Dtype::F16 => {
            let codes = bytes.chunks_exact(2);
            codes
                .map(|b| f16::from_le_bytes(pair(b)).to_f32())
                .collect()
        }
        Dtype::BF16 => {
            let codes = bytes.chunks_exact(2);
            codes
                .map(|b| bf16::from_le_bytes(pair(b)).to_f32())
                .collect()
        }
        _ => {
            let codes = bytes.chunks_exact(4);
            codes
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()
        }
    }
}

/// A format and a page size, mostly ones that go together.
pub fn draw_format(draw: &mut Draw<'_, '_>) -> (KvFormat, usize) {
    let page_size = if draw.once_in(12) {
        draw.size()
    } else {
        draw.pick(&[16, 32, 64, 64, 128])
    };
    (draw.format(), page_size)
}

/// Shapes and values of tensors by name.
pub type Values = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A file of f32 tensors: each tensor's shape and values by name. None if it is no such file.
pub fn read_values(bytes: &[u8]) -> Option<Values> {
    let tensors = SafeTensors::deserialize(bytes).ok()?;
    let all = tensors.tensors().into_iter().map(|(name, view)| {
        if view.dtype() != Dtype::F32 {
            return None;
        }
        let values = decoded(Dtype::F32, view.data());
        Some((name, (view.shape().to_vec(), values)))
    });
    all.collect()
}
