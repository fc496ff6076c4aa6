//! The header of a GGUF file: its metadata, and where its tensors lie.
//!
//! Every count and length is held to the bytes that are left of the file, and to a limit, before memory is taken for it, so that a damaged
//! file costs no more than a few times its size. A key or a name that occurs twice is refused, and so are tensors that do not lie side by
//! side: the file is damaged.
//!
//! Source of the layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::{
    collections::BTreeMap,
    io::{Read, Seek, SeekFrom},
};

use candle_core::quantized::GgmlDType;

use super::metadata::{Metadata, Value};

/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Most values of the metadata, and most tensors.
const MAX_ENTRIES: u64 = 1 << 16;
/// Most elements of an array: the most tokens of a vocabulary.
const MAX_ELEMENTS: u64 = 1 << 24;
/// Most bytes of a string.
const MAX_STRING: u64 = 1 << 26;
/// The alignment of tensors in files that name none.
const ALIGNMENT: u64 = 32;

/// What the header of a file says.
pub(super) struct Header {
    pub metadata: Metadata,
    pub tensors: BTreeMap<String, Place>,
}

/// Where a tensor lies, and how it is packed.
pub(super) struct Place {
    pub dtype: GgmlDType,
    /// Dimensions, the innermost last.
    pub shape: Vec<usize>,
    /// Its first byte in the file.
    pub start: u64,
    pub bytes: u64,
}

/// A file that is read from the front.
struct Source<'a, R> {
    file: &'a mut R,
    /// Bytes that are left.
    left: u64,
}

impl<R: Read> Source<'_, R> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        let read = self.file.read_exact(bytes);
        read.map_err(|_| "its header ends too soon".to_owned())?;
        self.left = self.left.saturating_sub(bytes.len() as u64);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// A count of items, each of `size` bytes or more.
    fn count(&mut self, what: &str, size: u64, most: u64) -> Result<usize, String> {
        let count = u64::from_le_bytes(self.array()?);
        if count
            .checked_mul(size)
            .is_none_or(|bytes| bytes > self.left)
        {
            return Err(format!("{what} {count}, more than the file has bytes for"));
        }
        match count <= most {
            true => Ok(count as usize),
            false => Err(format!("{what} {count}; allowed: up to {most}")),
        }
    }

    /// A text; bytes that are no UTF-8 become U+FFFD, and NULs behind it, which some writers leave, are dropped.
    fn text(&mut self) -> Result<String, String> {
        let len = self.count("a string's length is", 1, MAX_STRING)?;
        let mut bytes = vec![0; len];
        self.fill(&mut bytes)?;
        let end = bytes
            .iter()
            .rposition(|b| *b != 0)
            .map_or(0, |last| last + 1);
        bytes.truncate(end);
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(error) => Ok(String::from_utf8_lossy(error.as_bytes()).into_owned()),
        }
    }

    fn value(&mut self) -> Result<Value, String> {
        match self.u32()? {
            7 => match self.array()? {
                [0] => Ok(Value::Flag(false)),
                [1] => Ok(Value::Flag(true)),
                [byte] => Err(format!(
                    "its header has the truth value {byte}; allowed: 0, 1"
                )),
            },
            8 => Ok(Value::Text(self.text()?)),
            9 => self.list(),
            kind => {
                let mut bytes = [0; 8];
                let number = &mut bytes[..size(kind)?];
                self.fill(number)?;
                number_of(kind, number)
            }
        }
    }

    /// An array; those of numbers are read in one piece.
    fn list(&mut self) -> Result<Value, String> {
        let (kind, what) = (self.u32()?, "an array's length is");
        if kind == 8 {
            let count = self.count(what, 8, MAX_ELEMENTS)?;
            let texts: Result<_, _> = (0..count).map(|_| self.text()).collect();
            return Ok(Value::Texts(texts?));
        }
        let size = size(kind)?;
        let count = self.count(what, size as u64, MAX_ELEMENTS)?;
        let mut bytes = vec![0; count * size];
        self.fill(&mut bytes)?;
        Value::numbers(bytes.chunks_exact(size).map(|x| number_of(kind, x)))
    }

    /// A tensor's name, and its place with the start counted from the first tensor's.
    fn tensor(&mut self) -> Result<(String, Place), String> {
        let name = self.text()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(format!(
                "a tensor has {dims} dimensions; allowed: {MAX_DIMS}"
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.insert(0, u64::from_le_bytes(self.array()?) as usize);
        }
        let dtype = dtype(self.u32()?).map_err(|reason| format!("tensor {name} {reason}"))?;
        let start = u64::from_le_bytes(self.array()?);
        let block = dtype.block_size();
        let elements = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
        let bytes = elements.and_then(|n| (n / block).checked_mul(dtype.type_size()));
        let row = shape.last().copied().unwrap_or(1);
        let bytes = bytes.filter(|_| row.is_multiple_of(block)).ok_or_else(|| {
            format!("tensor {name} has rows of no whole blocks, or is too large: {shape:?}")
        })?;
        let place = Place {
            dtype,
            shape,
            start,
            bytes: bytes as u64,
        };
        Ok((name, place))
    }
}

/// Bytes of a number of a type.
fn size(kind: u32) -> Result<usize, String> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        9 => Err("its header has an array of arrays, which is not supported".to_owned()),
        kind => Err(format!("its header has a value of the unknown type {kind}")),
    }
}

/// The number of a type that these bytes are; truth values of an array are numbers.
fn number_of(kind: u32, bytes: &[u8]) -> Result<Value, String> {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let x = u64::from_le_bytes(wide);
    Ok(match kind {
        1 => Value::Integer(i128::from(x as i8)),
        3 => Value::Integer(i128::from(x as i16)),
        5 => Value::Integer(i128::from(x as i32)),
        11 => Value::Integer(i128::from(x as i64)),
        6 => Value::Float(f64::from(f32::from_bits(x as u32))),
        12 => Value::Float(f64::from_bits(x)),
        _ => Value::Integer(i128::from(x)),
    })
}

/// The packing of a tensor by GGML's number; the reason, where candle does not read it.
fn dtype(number: u32) -> Result<GgmlDType, String> {
    Ok(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        9 => GgmlDType::Q8_1,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        15 => GgmlDType::Q8K,
        30 => GgmlDType::BF16,
        _ => {
            return Err(format!(
                "is packed by GGML's type {number}; supported: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q8_1, q2_K to q6_K, q8_K"
            ));
        }
    })
}

/// The alignment of tensors.
fn alignment(metadata: &Metadata) -> Result<u64, String> {
    match metadata.count("general.alignment")? {
        None => Ok(ALIGNMENT),
        Some(given) if given.is_power_of_two() && given <= 1 << 20 => Ok(given as u64),
        Some(given) => Err(format!(
            "its alignment is {given}; allowed: powers of two up to 2^20"
        )),
    }
}

/// Moves tensors to where the first one starts, and refuses those that do not lie side by side, each at the alignment, within the file.
fn settle(
    tensors: &mut BTreeMap<String, Place>,
    data: u64,
    alignment: u64,
    len: u64,
) -> Result<(), String> {
    let mut all: Vec<_> = tensors.iter_mut().collect();
    all.sort_by_key(|(_, place)| (place.start, place.bytes));
    let mut next = 0u64;
    for (name, place) in all {
        if place.start != next {
            return Err(format!(
                "tensor {name} begins at byte {} of the tensors, and the one before it ends at {next}; the file is damaged",
                place.start
            ));
        }
        place.start += data;
        let end = place.start.checked_add(place.bytes);
        let end = end.filter(|end| *end <= len);
        let end = end.ok_or_else(|| format!("tensor {name} lies beyond the end of the file"))?;
        next = (end - data).next_multiple_of(alignment);
    }
    Ok(())
}

/// Reads the header of a file.
pub(super) fn read<R: Read + Seek>(file: &mut R) -> Result<Header, String> {
    let len = file.seek(SeekFrom::End(0)).map_err(|e| e.to_string())?;
    file.rewind().map_err(|e| e.to_string())?;
    let mut source = Source { file, left: len };
    if &source.array()? != b"GGUF" {
        return Err("it does not begin with GGUF".to_owned());
    }
    let version = source.u32()?;
    if !matches!(version, 2 | 3) {
        return Err(format!("it is GGUF version {version}; allowed: 2, 3"));
    }
    let count = source.count("the number of tensors is", 24, MAX_ENTRIES)?;
    let values = source.count("the number of values is", 12, MAX_ENTRIES)?;
    let mut metadata = Metadata::default();
    for _ in 0..values {
        let key = source.text()?;
        let value = source.value()?;
        metadata.insert(key, value)?;
    }
    let mut tensors = BTreeMap::new();
    for _ in 0..count {
        let (name, place) = source.tensor()?;
        if tensors.insert(name.clone(), place).is_some() {
            return Err(format!("it has two tensors called {name}"));
        }
    }
    let alignment = alignment(&metadata)?;
    let data = (len - source.left).next_multiple_of(alignment);
    settle(&mut tensors, data, alignment, len)?;
    Ok(Header { metadata, tensors })
}
