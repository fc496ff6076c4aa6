//! A check of a GGUF file's header before candle reads it: candle allocates what a header asks for.
//!
//! Every length is held to the bytes that are left of the file, so that a damaged file costs no more memory than it is large.
//!
//! Source of the layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::io::{Read, Seek, SeekFrom};

/// The key of the alignment of tensors.
const ALIGNMENT: &[u8; 17] = b"general.alignment";

/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;

/// A file that is read from the front.
struct Header<'a, R> {
    file: &'a mut R,
    len: u64,
}

impl<R: Read + Seek> Header<'_, R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        let read = self.file.read_exact(&mut bytes);
        read.map_err(|_| "its header ends too soon".to_owned())?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// Passes over `count` items of `size` bytes or more.
    fn check_left(&mut self, what: &str, count: u64, size: u64) -> Result<u64, String> {
        let position = self.file.stream_position().map_err(|e| e.to_string())?;
        let left = self.len.saturating_sub(position);
        match count.checked_mul(size).filter(|bytes| *bytes <= left) {
            Some(bytes) => Ok(bytes),
            None => Err(format!("{what} {count}, more than the file has bytes for")),
        }
    }

    fn skip(&mut self, what: &str, count: u64, size: u64) -> Result<(), String> {
        let bytes = self.check_left(what, count, size)?;
        let moved = self.file.seek(SeekFrom::Current(bytes as i64));
        moved.map(drop).map_err(|e| e.to_string())
    }

    fn string(&mut self) -> Result<(), String> {
        let len = self.u64()?;
        self.skip("a string's length is", len, 1)
    }

    /// A string if it is no longer than a key that this check knows; others are passed over.
    fn key(&mut self) -> Result<Vec<u8>, String> {
        let len = self.u64()?;
        if len != ALIGNMENT.len() as u64 {
            self.skip("a string's length is", len, 1)?;
            return Ok(Vec::new());
        }
        Ok(self.bytes::<{ ALIGNMENT.len() }>()?.to_vec())
    }

    /// The alignment of tensors, by which candle divides.
    fn alignment(&mut self, kind: u32) -> Result<(), String> {
        let alignment = match kind {
            0 => u32::from(self.bytes::<1>()?[0]),
            2 => u32::from(u16::from_le_bytes(self.bytes()?)),
            4 => self.u32()?,
            kind => return Err(format!("its alignment is of the type {kind}; allowed: u32")),
        };
        match alignment.is_power_of_two() && alignment <= 1 << 20 {
            true => Ok(()),
            false => Err(format!(
                "its alignment is {alignment}; allowed: powers of two up to 2^20"
            )),
        }
    }

    fn value(&mut self, kind: u32) -> Result<(), String> {
        match kind {
            0 | 1 | 7 => self.skip("bytes are", 1, 1),
            2 | 3 => self.skip("bytes are", 2, 1),
            4..=6 => self.skip("bytes are", 4, 1),
            10..=12 => self.skip("bytes are", 8, 1),
            8 => self.string(),
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                if kind == 9 {
                    return Err("its header has an array of arrays".to_owned());
                }
                self.check_left("an array's length is", count, if kind == 8 { 8 } else { 1 })?;
                (0..count).try_for_each(|_| self.value(kind))
            }
            _ => Err(format!("its header has a value of the unknown type {kind}")),
        }
    }

    fn tensor(&mut self) -> Result<(), String> {
        self.string()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(format!(
                "a tensor has {dims} dimensions; allowed: {MAX_DIMS}"
            ));
        }
        let mut elements = 1u64;
        for _ in 0..dims {
            let dim = self.u64()?;
            elements = elements.saturating_mul(dim);
        }
        // The smallest packed element here takes 2 bits.
        if elements / 4 > self.len {
            return Err(format!(
                "a tensor has {elements} elements, more than the file has bytes for"
            ));
        }
        self.skip("a tensor's place takes", 12, 1)
    }
}

/// Refuses a header that does not fit the file, and leaves `file` at its start.
pub(super) fn check<R: Read + Seek>(file: &mut R) -> Result<(), String> {
    let len = file.seek(SeekFrom::End(0)).map_err(|e| e.to_string())?;
    file.rewind().map_err(|e| e.to_string())?;
    let mut header = Header { file, len };
    if &header.bytes()? != b"GGUF" {
        return Err("it does not begin with GGUF".to_owned());
    }
    let version = header.u32()?;
    if !matches!(version, 2 | 3) {
        return Err(format!("it is GGUF version {version}; allowed: 2, 3"));
    }
    let (tensors, values) = (header.u64()?, header.u64()?);
    header.check_left("the number of tensors is", tensors, 24)?;
    header.check_left("the number of values is", values, 12)?;
    for _ in 0..values {
        let key = header.key()?;
        let kind = header.u32()?;
        match key == ALIGNMENT {
            true => header.alignment(kind)?,
            false => header.value(kind)?,
        }
    }
    (0..tensors).try_for_each(|_| header.tensor())?;
    file.rewind().map_err(|e| e.to_string())
}
