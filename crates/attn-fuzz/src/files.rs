//! Fuzzes the program's readers of safetensors and page files, inside this process: a whole file goes to pages and back, a
//! damaged one is an error or a whole answer, and where there is an error there is no file.

use std::{ffi::OsStr, fs, path::Path};

use arbitrary::Unstructured;
use attn_cli::console::Console;
use attn_core::{HeadDim, KvFormat, Scheme};
use clap::Parser;
use safetensors::Dtype;

use crate::{
    draw::Draw,
    driver::scratch,
    hold,
    pages::is_defined,
    tensors::{Content, File, Values, decoded, draw_format, read_values},
};

/// The program's functions under test.
#[derive(Debug, Clone, Copy)]
pub struct Doors {
    /// `attn quantize`.
    pub quantize: fn(&Path, &Path, KvFormat, usize) -> anyhow::Result<()>,
    /// `attn dequantize`.
    pub dequantize: fn(&Path, &Path) -> anyhow::Result<()>,
}

/// The program's arguments, as it parses them.
#[derive(clap::Parser)]
struct Arguments<A: clap::Args> {
    #[command(flatten)]
    inner: A,
}

/// Parses arguments, and hands them to a function of the program that prints nowhere.
fn call<A: clap::Args>(
    arguments: &[&OsStr],
    function: fn(&A, &mut Console<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let arguments = Arguments::<A>::try_parse_from(arguments)?;
    let (mut out, mut err) = (std::io::sink(), std::io::sink());
    function(&arguments.inner, &mut Console::new(&mut out, &mut err))
}

/// Those of the crate `attn`.
pub const DOORS: Doors = Doors {
    quantize: |input, output, format, page_size| {
        let (format, page_size) = (format.to_string(), page_size.to_string());
        let [kv, size] = ["--kv", "--page-size"].map(OsStr::new);
        let (format, page_size) = (OsStr::new(&format), OsStr::new(&page_size));
        let paths = [OsStr::new("attn"), input.as_ref(), output.as_ref()];
        let arguments = [&paths[..], &[kv, format, size, page_size]].concat();
        call(&arguments, attn_cli::quantize::quantize)
    },
    dequantize: |input, output| {
        let paths = [OsStr::new("attn"), input.as_ref(), output.as_ref()];
        call(&paths, attn_cli::quantize::dequantize)
    },
};

/// Draws files; see the module.
///
/// # Errors
/// What does not hold.
pub fn fuzz(u: &mut Unstructured<'_>) -> Result<(), String> {
    fuzz_doors(u, &DOORS)
}

/// Fuzzes other functions in place of the library's.
///
/// # Errors
/// What does not hold.
pub fn fuzz_doors(u: &mut Unstructured<'_>, doors: &Doors) -> Result<(), String> {
    let folder = scratch();
    let folder = tempfile::tempdir_in(folder).map_err(|e| e.to_string())?;
    in_folder(&mut Draw(u), doors, folder.path())
}

fn in_folder(draw: &mut Draw<'_, '_>, doors: &Doors, folder: &Path) -> Result<(), String> {
    let [input, pages, output] = ["in", "pages", "out"].map(|name| folder.join(name));
    let (file, content) = File::draw(draw);
    let (format, page_size) = draw_format(draw);
    let damaged = draw.once_in(2);
    let bytes = if damaged {
        file.damage(draw)
    } else {
        file.bytes()
    };
    write(&input, &bytes)?;
    // `attn run` reads with this.
    let _ = attn_cli::data::load(Some(&input), None);
    let done = (doors.quantize)(&input, &pages, format, page_size);
    only_on_success(folder, done.as_ref(), &["in", "pages"])?;
    if let Err(error) = done {
        let fits = content.finite && fits(format, page_size, &content);
        hold!(
            damaged || !fits,
            "a whole file is refused: {error:#}; {content:?} {format} {page_size}"
        );
        return Ok(());
    }
    hold!(
        damaged || content.finite,
        "{content:?} is not finite, but quantized"
    );
    let made = fs::read(&pages).map_err(|e| e.to_string())?;
    let done = (doors.dequantize)(&pages, &output);
    only_on_success(folder, done.as_ref(), &["in", "pages", "out"])?;
    done.map_err(|e| format!("pages of {content:?} {format} {page_size} are refused: {e:#}"))?;
    let back = check_output(&output)?;
    if !damaged {
        for name in &content.names {
            let [k_shape, v_shape] = content.shapes;
            let sides = [("k", format.k, k_shape), ("v", format.v, v_shape)];
            for (side, scheme, of_input) in sides {
                let key = format!("{name}.{side}");
                let Some((shape, values)) = back.get(&key) else {
                    return Err(format!("{key} of {content:?} is lost"));
                };
                hold!(
                    shape[..] == of_input,
                    "{key} has shape {shape:?}, not {of_input:?}"
                );
                close(&bytes, &key, scheme, values)?;
            }
        }
    }
    let mut made = File::parse(&made).ok_or("pages are in no file")?;
    if draw.once_in(2) {
        made = made.without_checksum();
    }
    let damaged = made.damage(draw);
    write(&pages, &damaged)?;
    fs::remove_file(&output).map_err(|e| e.to_string())?;
    let done = (doors.dequantize)(&pages, &output);
    only_on_success(folder, done.as_ref(), &["in", "pages", "out"])?;
    if done.is_ok() {
        check_output(&output)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(|e| e.to_string())
}

/// Whether the program must hold a whole file in the format; one whose K and V have unlike dims it may refuse.
fn fits(format: KvFormat, page_size: usize, content: &Content) -> bool {
    let [[tokens, _, k], [_, _, v]] = content.shapes;
    let reserved = ["attn", "kv", "page_size", "checksum"];
    k == v
        && tokens > 0
        && [16, 32, 64, 128].contains(&page_size)
        && is_defined(format, HeadDim { k, v })
        && !content
            .names
            .iter()
            .any(|name| reserved.contains(&name.as_str()))
}

/// The folder holds the named files, the last of them only after a success.
fn only_on_success(
    folder: &Path,
    done: Result<&(), &anyhow::Error>,
    names: &[&str],
) -> Result<(), String> {
    let mut found: Vec<String> = fs::read_dir(folder)
        .map_err(|e| e.to_string())?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    found.sort();
    let names = if done.is_ok() {
        names
    } else {
        &names[..names.len() - 1]
    };
    let mut want = names.to_vec();
    want.sort_unstable();
    hold!(
        found == want,
        "the folder holds {found:?}, not {want:?}, after {done:?}"
    );
    Ok(())
}

/// A written file can be read, and its values are finite.
fn check_output(path: &Path) -> Result<Values, String> {
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let values = read_values(&bytes).ok_or("the output is no file of f32 tensors")?;
    let finite = values.values().flat_map(|(_, x)| x).all(|x| x.is_finite());
    hold!(finite, "the output holds NaN or infinity");
    Ok(values)
}

/// Values are those of the file: to the bit where f16 goes through f16, else to a step of int4 on numbers up to 3. A row of the error of rotated
/// 4-bit codes is a sum of up to 512 rounding errors, of which 2 is eight standard deviations.
fn close(bytes: &[u8], key: &str, scheme: Scheme, values: &[f32]) -> Result<(), String> {
    let file = safetensors::SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let view = file.tensor(key).map_err(|e| e.to_string())?;
    let want = decoded(view.dtype(), view.data());
    let exact = scheme == Scheme::F16 && view.dtype() == Dtype::F16;
    let bound = match scheme {
        _ if exact => 0.0,
        Scheme::RotatedInt4 { .. } => 2.0,
        _ => 0.35,
    };
    hold!(
        want.len() == values.len(),
        "{key} has {} values",
        values.len()
    );
    for (i, (want, got)) in want.iter().zip(values).enumerate() {
        hold!(
            (want - got).abs() <= bound,
            "{key}[{i}] is {got} in {scheme}, not {want}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds(doors: &Doors) -> bool {
        crate::finds(300, fuzz, |u| fuzz_doors(u, doors))
    }

    #[test]
    fn an_output_beside_an_error_is_found() {
        assert!(finds(&Doors {
            dequantize: |input, output| {
                let done = (DOORS.dequantize)(input, output);
                if done.is_err() {
                    fs::write(output, b"half")?;
                }
                done
            },
            ..DOORS
        }));
    }

    #[test]
    fn a_flipped_byte_of_the_output_is_found() {
        assert!(finds(&Doors {
            dequantize: |input, output| {
                (DOORS.dequantize)(input, output)?;
                let mut bytes = fs::read(output)?;
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                }
                Ok(fs::write(output, bytes)?)
            },
            ..DOORS
        }));
    }
}
