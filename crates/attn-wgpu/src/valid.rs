//! Whether every specialisation of `kernels/wgsl` is valid WGSL: by naga, and by tint where it is installed.

use std::{collections::HashMap, io::ErrorKind, path::Path, process::Command};

use attn_core::{HeadDim, Heads, KvFormat, Problem, Scheme};
use naga::{
    front::wgsl,
    valid::{Capabilities, ValidationFlags, Validator},
};

use attn_kernels::wgsl::{
    append::AppendKey,
    arithmetic_text,
    decode::{KvLayout, Tuning, decode_key, decode_text, workgroup_bytes},
    products_text, read_text,
};

fn validate(name: &str, text: &str) {
    let module = wgsl::parse_str(text)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(text)));
    Validator::new(ValidationFlags::all(), Capabilities::empty())
        .validate(&module)
        .unwrap_or_else(|error| panic!("{name}: {}", error.emit_to_string(text)));
}

/// The decode kernels of one shape, from pages and from views, at WebGPU's default workgroup memory and with more.
fn each_decode(
    problem: &Problem,
    format: KvFormat,
    page_size: usize,
    pools: usize,
    each: &mut impl FnMut(&str, &str),
) {
    let viewed = [format.k, format.v]
        .iter()
        .all(|scheme| scheme.code_bits() > 4 && !scheme.is_rotated());
    let mut kinds = vec![(false, false)];
    kinds.extend(viewed.then_some((true, false)));
    kinds.extend(format.check_centres().ok().map(|()| (false, true)));
    let kinds = kinds.into_iter();
    for ((view, centres), shared_bytes) in
        kinds.flat_map(|kind| [16384, 32768].map(|bytes| (kind, bytes)))
    {
        let layout = KvLayout {
            format,
            page_size,
            pools,
            view,
            centres,
        };
        let mut tuning = Tuning::default();
        tuning.by_tiles = Some(view);
        let key = decode_key(problem, layout, shared_bytes, &tuning);
        assert!(workgroup_bytes(&key) <= shared_bytes, "{key:?}");
        for name in ["decode_split", "decode_merge"] {
            let text = decode_text(&format!("{name}.wgsl"), &key).unwrap();
            each(&format!("{name} for {key:?}"), &text);
        }
    }
}

/// Calls `each` with the name and the text of the kernels, over all formats and the other inputs of the constants.
fn each_specialisation(mut each: impl FnMut(&str, &str)) {
    each("check_arithmetic.wgsl", &arithmetic_text().unwrap());
    each("read.wgsl", &read_text().unwrap());
    each("products.wgsl", &products_text().unwrap());
    let shapes = [
        (64, 128, 8),
        (80, 64, 1),
        (96, 64, 2),
        (128, 64, 8),
        (192, 32, 4),
        (256, 16, 8),
        (256, 64, 8),
        (512, 64, 2),
        (160, 32, 4),
    ];
    let shapes = shapes.map(|(dim, page_size, rows)| (HeadDim::same(dim), page_size, rows));
    let unlike = [((192, 128), 64, 8), ((576, 512), 64, 1), ((64, 320), 16, 4)];
    let unlike = unlike.map(|(dim, page_size, rows)| (HeadDim::from(dim), page_size, rows));
    let shapes: Vec<_> = shapes.into_iter().chain(unlike).collect();
    let formats = Scheme::ALL.map(|k| Scheme::ALL.map(|v| KvFormat::new(k, v)));
    let all = formats.into_iter().flatten();
    let all = all.chain([KvFormat::INT8_LATENTS; 4]);
    for (i, format) in all.enumerate() {
        // Three shapes of each pair, by turns: all of them would take minutes.
        let own = shapes.iter().cycle().skip(i % shapes.len());
        for &(head_dim, page_size, rows) in own.step_by(4).take(3) {
            if format.check(head_dim).is_err() {
                continue;
            }
            let pools = 1 + rows / 4;
            let mut key = AppendKey {
                format,
                head_dim,
                page_size,
                pools,
                centres: false,
            };
            each(
                &format!("append.wgsl for {key:?}"),
                &key.text("append.wgsl").unwrap(),
            );
            key.centres = format.check_centres().is_ok();
            for file in ["append.wgsl", "centre.wgsl"]
                .iter()
                .filter(|_| key.centres)
            {
                each(&format!("{file} for {key:?}"), &key.text(file).unwrap());
            }
            let mut problem = Problem::new(Heads::new(rows, 1, head_dim), vec![1]);
            if rows == 2 {
                problem.scores.softcap = Some(1.0);
                problem.scores.alibi_slopes = Some(vec![1.0; 2]);
            }
            each_decode(&problem, format, page_size, pools, &mut each);
        }
    }
}

#[test]
fn every_specialisation_is_valid_wgsl() {
    each_specialisation(validate);
}

/// Browsers compile WGSL with tint, which also requires uniform control flow at barriers.
#[test]
fn tint_accepts_every_specialisation() {
    match Command::new("tint").arg("--help").output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("skipped: there is no tint on PATH; naga alone has validated the kernels");
            return;
        }
        found => drop(found.unwrap()),
    }
    let mut texts = HashMap::new();
    each_specialisation(|name, text| {
        texts.insert(text.to_owned(), name.to_owned());
    });
    let folder = std::env::temp_dir().join(format!("attn-tint-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let texts: Vec<_> = texts.into_iter().collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let refused: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = texts
            .chunks(texts.len().div_ceil(threads))
            .enumerate()
            .map(|(i, part)| {
                let file = folder.join(format!("{i}.wgsl"));
                scope.spawn(move || {
                    let refusals = part.iter().filter_map(|(text, name)| {
                        let reason = tint_refusal(&file, text)?;
                        Some(format!("{name}: {reason}"))
                    });
                    refusals.collect::<Vec<_>>()
                })
            })
            .collect();
        parts
            .into_iter()
            .flat_map(|part| part.join().unwrap())
            .collect()
    });
    std::fs::remove_dir_all(&folder).unwrap();
    println!("tint: {} kernels, {} refused", texts.len(), refused.len());
    let first = refused.first().cloned().unwrap_or_default();
    assert!(refused.is_empty(), "{} refused; {first}", refused.len());
}

/// The reason why tint refuses a text, which is written to `file`.
fn tint_refusal(file: &Path, text: &str) -> Option<String> {
    std::fs::write(file, text).unwrap();
    let output = Command::new("tint")
        .args(["--format", "wgsl", "-o"])
        .arg(file.with_extension("out"))
        .arg(file)
        .output()
        .unwrap();
    let reason = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(reason)
}
