//! The program as the tests start it, and small safetensors files for it. A test target's root names the program: `const PROGRAM`.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use crate::PROGRAM;

/// The program with arguments, and none of the variables that it reads.
pub fn attn(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    for name in [
        "ATTN_BACKEND",
        "ATTN_TABLE",
        "ATTN_CASE",
        "RAYON_NUM_THREADS",
    ] {
        command.env_remove(name);
    }
    command.args(args);
    command
}

pub fn run(args: &[&str]) -> Output {
    attn(args).output().expect("the program starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON value")
}

/// What a command that succeeds prints on standard output.
pub fn printed(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Writes K and V of a file as pages of a format; gives the command's JSON.
pub fn quantize(file: &str, pages: &str, kv: &str) -> Value {
    json(&run(&["quantize", file, pages, "--kv", kv, "--json"]))
}

/// Writes the values of pages as f32; gives the command's JSON.
pub fn dequantize(pages: &str, back: &str) -> Value {
    json(&run(&["dequantize", pages, back, "--json"]))
}

/// Misuse: exit code 2, nothing on stdout, and a sentence that says these things.
pub fn refused(output: &Output, says: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    assert!(!error.contains("panicked"), "{error}");
    for part in says {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

pub fn bundled() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join("crates/attn-cli/data/smollm2-decode.safetensors");
    path.to_str().unwrap().to_owned()
}

/// A folder of the test's own; it goes with the value.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Folder(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder"))
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// The paths of several files.
    pub fn paths<const N: usize>(&self, names: [&str; N]) -> [String; N] {
        names.map(|name| self.path(name))
    }

    /// Names of all files, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = entries
            .map(|entry| name(entry).into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Writes f32 tensors and metadata.
    pub fn write(&self, name: &str, tensors: &[(&str, &[usize], &[f32])], scale: &str) -> String {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, _, x)| x.iter().flat_map(|x| x.to_le_bytes()).collect())
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes);
            (*name, view.expect("as many bytes as the shape has"))
        });
        let metadata = HashMap::from([("scale".to_owned(), scale.to_owned())]);
        let file = safetensors::serialize(views, Some(metadata)).expect("a legal file");
        let path = PathBuf::from(self.path(name));
        fs::write(&path, file).expect("the folder is writable");
        path.to_str().unwrap().to_owned()
    }
}

/// An f32 tensor of a file.
pub fn tensor(path: &str, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = fs::read(path).expect("the file is there");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let view = file.tensor(name).expect("the tensor is there");
    assert_eq!(view.dtype(), Dtype::F32);
    let values = view.data().chunks_exact(4);
    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (view.shape().to_vec(), values.collect())
}

/// Tokens, KV heads and dims of [`numbers`].
pub const TOKENS: usize = 70;
pub const HEADS: usize = 2;
pub const DIM: usize = 64;

/// Numbers that f16 holds exactly, `[tokens, heads, dims]`: head 1 a hundred times head 0, V negative.
pub fn numbers(side: usize) -> Vec<f32> {
    let sign = [1.0, -1.0][side];
    let number = |i: usize| {
        let (token, head) = (i / (HEADS * DIM), i / DIM % HEADS);
        let by = [1.0 / 1024.0, 0.125][head];
        sign * by * (1 + (token * DIM + i % DIM) % 2047) as f32
    };
    (0..HEADS * TOKENS * DIM).map(number).collect()
}

/// A folder, and in it the file `in` with those numbers as the layer `one`.
pub fn one_layer() -> (Folder, String) {
    let folder = Folder::new();
    let file = input(&folder, "in", "one");
    (folder, file)
}

/// A file with one layer of those numbers.
pub fn input(folder: &Folder, name: &str, layer: &str) -> String {
    let shape = [TOKENS, HEADS, DIM];
    let [k, v] = [0, 1].map(numbers);
    let (k_name, v_name) = (format!("{layer}.k"), format!("{layer}.v"));
    let tensors = [(&*k_name, &shape[..], &k[..]), (&*v_name, &shape, &v)];
    folder.write(name, &tensors, "0.125")
}
