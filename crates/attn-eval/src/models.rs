//! `attn-eval generate` and `attn-eval perplexity`: a whole model, from its file to text, over a cache of any format.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, anyhow, ensure};
use attn::{DecodeAttention, KvFormat};
use attn_cli::{console::Console, figures::number, program::Backends, target::Target};
use attn_llm::{
    Comparison, Event, Fidelity, Generation, Model, Options, PagedKv, Products, Tokenizer,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

/// The model.
#[derive(clap::Args)]
pub(crate) struct FileArgs {
    /// A GGUF file, or a folder with config.json, tokenizer.json and safetensors: Llama 2 and 3, SmolLM2, Mistral, Qwen 2 and 3. With the feature `hub`
    /// also a name on huggingface.co: owner/model or owner/model/FILE.gguf, @revision behind the model.
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Matrix products: f32; packed: with a GGUF file's own blocks and activations in 8 bits; cuda: in f32 on a GPU, with the feature `products-cuda`.
    #[arg(long, default_value_t)]
    pub products: Products,
    /// The most tokens of a prompt or a text that are computed at once; results do not depend on it.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
}

/// The model, and where its attention runs.
#[derive(clap::Args)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    pub file: FileArgs,
    /// cuda, wgpu or cpu, for attention; the best present by default.
    #[arg(long)]
    backend: Option<attn::BackendId>,
}

/// What `attn-eval generate` reads.
#[derive(clap::Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Formats of the cache; several print their texts one after another.
    #[arg(long, value_delimiter = ',', default_value = "int8")]
    kv: Vec<KvFormat>,
    /// The most tokens to generate for a prompt.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// 0 takes the likeliest token; above, tokens are drawn.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// The seed of each prompt's draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The most prompts computed at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Formats in columns, with the first token that differs from the first format's.
    #[arg(long)]
    side_by_side: bool,
    /// One prompt or several; what they all begin with is computed once.
    #[arg(required = true)]
    prompts: Vec<String>,
}

/// What `attn-eval perplexity` reads.
#[derive(clap::Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text file; several are read one after another.
    #[arg(long, required = true, value_delimiter = ',', value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Formats, and f32: plain attention over a cache of f32, which all are compared with, products in f32.
    #[arg(long, value_delimiter = ',', default_value = FORMATS, value_parser = format)]
    kv: Vec<CacheFormat>,
    /// Store keys with their centres, also where caches take them off by default.
    #[arg(long)]
    no_centres: bool,
    /// Give all keys a constant of this norm in the five slowest rotary pairs, as biases of K do; plain attention does not see it.
    #[arg(long, default_value_t = 0.0, value_name = "NORM", value_parser = norm)]
    k_bias: f32,
    /// Tokens of a piece; each begins with an empty cache.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    tokens: u32,
    /// Pieces of each text, from its begin on.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pieces: u32,
    /// An SVG file for the divergence over bytes per token.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Replace the file of `--plot` if it exists.
    #[arg(long)]
    force: bool,
}

/// The formats that are compared by default.
pub(crate) const FORMATS: &str = "f32,bf16,fp8,int8,int8/int4,int4";

/// A format of the library, or f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheFormat(pub Option<KvFormat>);

pub(crate) fn format(name: &str) -> Result<CacheFormat, String> {
    match name {
        "f32" => Ok(CacheFormat(None)),
        name => match name.parse() {
            Ok(format) => Ok(CacheFormat(Some(format))),
            Err(error) => Err(format!("{error}; or f32")),
        },
    }
}

/// The norm of a constant: finite, and not so large that keys overflow.
fn norm(given: &str) -> Result<f32, String> {
    let norm = given.parse::<f32>().ok();
    let norm = norm.filter(|norm| (0.0..=1e6).contains(norm));
    norm.ok_or_else(|| "a number from 0 to 1000000".to_owned())
}

/// A model that is ready, and the backend of its attention.
pub(crate) struct Ready {
    pub model: Model,
    /// With products in f32 the model is its own reference; with others it is this one.
    pub reference: Option<Model>,
    pub tokenizer: Tokenizer,
    pub backend: Arc<dyn DecodeAttention>,
    pub device: String,
}

impl ModelArgs {
    /// Opens the backend and reads the model; prints what its files leave open.
    pub fn open(&self, backends: &Backends, console: &mut Console<'_>) -> Result<Ready> {
        let selection = (backends.select)(self.backend)?;
        let device = selection.backend.device();
        let device = format!("{}: {} ({})", selection.id, device.name, device.detail);
        let (model, tokenizer) = self.file.open(console)?;
        Ok(Ready {
            model,
            reference: None,
            tokenizer,
            backend: Arc::from(selection.backend),
            device,
        })
    }

    /// The same, with the model whose products are in f32 where the model's own are not.
    pub fn open_compared(&self, backends: &Backends, console: &mut Console<'_>) -> Result<Ready> {
        let mut ready = self.open(backends, console)?;
        if self.file.products != Products::F32 {
            ready.reference = Some(load(&self.file.path()?, Products::F32)?.0);
        }
        Ok(ready)
    }
}

impl FileArgs {
    /// Reads the model; prints what its files leave open.
    pub fn open(&self, console: &mut Console<'_>) -> Result<(Model, Tokenizer)> {
        let (model, tokenizer) = load(&self.path()?, self.products)?;
        for remark in model.remarks() {
            console.remark(format_args!("{}: {remark}", self.model.display()));
        }
        Ok((model, tokenizer))
    }

    /// The files on this machine that the model may be read from: of a folder all that are JSON or safetensors, and those that lie beside a safetensors file.
    pub fn inputs(&self) -> Result<Vec<PathBuf>> {
        let is = |path: &Path, kind: &str| path.extension().is_some_and(|e| e == kind);
        let folder = match self.model.parent() {
            _ if self.model.is_dir() => self.model.as_path(),
            Some(folder) if is(&self.model, "safetensors") && self.model.exists() => folder,
            _ => return Ok(vec![self.model.clone()]),
        };
        let folder = match folder == Path::new("") {
            true => Path::new("."),
            false => folder,
        };
        let cannot = || format!("cannot list {}; check its permissions", folder.display());
        let mut files = vec![self.model.clone()];
        for entry in fs::read_dir(folder).with_context(cannot)? {
            let path = entry.with_context(cannot)?.path();
            if is(&path, "json") || is(&path, "safetensors") {
                files.push(path);
            }
        }
        Ok(files)
    }

    pub fn chunk(&self) -> usize {
        self.chunk as usize
    }

    /// Where the model's files are, once they are on this machine.
    fn path(&self) -> Result<PathBuf> {
        if self.model.exists() {
            return Ok(self.model.clone());
        }
        #[cfg(feature = "hub")]
        {
            let name = self.model.to_string_lossy();
            let bar = bar("fetching", 0);
            let path = attn_llm::hub::fetch(&name, &mut |file, done, of| {
                bar.set_message(format!("fetching {file}"));
                bar.set_length(of as u64);
                bar.set_position(done as u64);
            })?;
            bar.finish_and_clear();
            Ok(path)
        }
        #[cfg(not(feature = "hub"))]
        Err(anyhow!(
            "there is no file or folder {}; check the path (a build with the feature hub takes names on huggingface.co, too)",
            self.model.display()
        ))
    }
}

fn load(path: &Path, products: Products) -> Result<(Model, Tokenizer)> {
    let bar = bar("loading", 0);
    let loaded = attn_llm::load(path, products, &mut |layers, of| {
        bar.set_length(of as u64);
        bar.set_position(layers as u64);
    })?;
    bar.finish_and_clear();
    Ok(loaded)
}

/// A bar on standard error; it is drawn on terminals alone.
pub(crate) fn bar(what: &'static str, length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}");
    let bar = ProgressBar::new(length).with_message(what);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Tokens per second; NaN where none were timed.
fn rate(tokens: usize, time: std::time::Duration) -> f64 {
    tokens as f64 / time.as_secs_f64()
}

/// Generates texts and prints them, as tokens come where one text is printed at a time.
pub fn generate(args: &GenerateArgs, console: &mut Console<'_>, backends: &Backends) -> Result<()> {
    let ready = args.model.open(backends, console)?;
    let encode = |prompt: &String| ready.tokenizer.encode(prompt);
    let prompts: Vec<_> = args.prompts.iter().map(encode).collect::<Result<_, _>>()?;
    if !console.json {
        console.remark(&ready.device);
    }
    let mut runs = Vec::new();
    for &format in &args.kv {
        let run = generate_in(args, &ready, format, &prompts, console)?;
        runs.push((format, run));
    }
    if args.side_by_side {
        side_by_side(args, &ready, &runs, console)?;
    }
    let values: Vec<Value> = runs
        .iter()
        .map(|(format, run)| value(&ready, *format, run))
        .collect::<Result<_>>()?;
    console
        .value(&json!({ "device": ready.device, "prompts": args.prompts, "formats": values }))?;
    Ok(())
}

/// Generates the texts of all prompts over one format.
fn generate_in(
    args: &GenerateArgs,
    ready: &Ready,
    format: KvFormat,
    prompts: &[Vec<u32>],
    console: &mut Console<'_>,
) -> Result<Generation> {
    let options = Options {
        max_tokens: args.tokens as usize,
        chunk: args.model.file.chunk(),
        temperature: args.temperature,
        seed: args.seed,
        ends: ready.tokenizer.ends().to_vec(),
    };
    let slots = (args.batch as usize).min(prompts.len());
    let (sequences, needed) = attn_llm::generate::room(prompts, slots, options.max_tokens);
    let limit = ready.model.config().context;
    if needed > limit {
        return Err(attn_llm::Error::Context { needed, limit }.into());
    }
    let backend = Arc::clone(&ready.backend);
    let config = ready.model.config();
    let mut kv = PagedKv::new(
        backend,
        config,
        format,
        sequences,
        needed,
        options.chunk,
        true,
    )?;
    let streams = !console.json && !args.side_by_side && prompts.len() == 1;
    let mut text = ready.tokenizer.stream();
    let mut printed = Ok(());
    if streams && args.kv.len() > 1 {
        console.line(format_args!("[{format}]"))?;
    }
    let bar = bar("prompts", 0);
    let mut on_event = |event| -> Result<(), attn_llm::Error> {
        match event {
            Event::Prompt { done, of } => {
                bar.set_length(of as u64);
                bar.set_position(done as u64);
                if done == of {
                    bar.finish_and_clear();
                }
            }
            Event::Token { token, .. } if streams && printed.is_ok() => {
                let text = text.push(token)?;
                printed = console.text(text);
            }
            _ => {}
        }
        Ok(())
    };
    let run = attn_llm::generate(&ready.model, &mut kv, prompts, &options, &mut on_event)?;
    bar.finish_and_clear();
    printed?;
    if streams {
        console.line(text.finish()?)?;
    } else if !console.json && !args.side_by_side {
        for (prompt, tokens) in args.prompts.iter().zip(&run.texts) {
            let text = ready.tokenizer.decode(tokens)?;
            console.line(format_args!("[{format}] {prompt}{text}\n"))?;
        }
    }
    if !console.json {
        console.remark(format_args!(
            "{format}: prompt {} tokens, {:.1} per s; decode {} tokens, {:.1} per s; cache {:.2} MB",
            run.prompt_tokens,
            rate(run.prompt_tokens, run.prompt_time),
            run.decoded_tokens,
            rate(run.decoded_tokens, run.decode_time),
            run.cache_bytes as f64 / 1e6,
        ));
    }
    Ok(run)
}

/// A run in JSON.
fn value(ready: &Ready, format: KvFormat, run: &Generation) -> Result<Value> {
    let decode = |tokens: &Vec<u32>| ready.tokenizer.decode(tokens);
    let texts: Vec<String> = run.texts.iter().map(decode).collect::<Result<_, _>>()?;
    Ok(json!({
        "kv": format.to_string(), "texts": texts, "tokens": run.texts,
        "prompt_tokens": run.prompt_tokens, "decoded_tokens": run.decoded_tokens, "cache_bytes": run.cache_bytes,
        "prompt_tokens_per_s": number(rate(run.prompt_tokens, run.prompt_time)),
        "decoded_tokens_per_s": number(rate(run.decoded_tokens, run.decode_time)),
    }))
}

/// Prints each prompt's texts in all formats, and how long each is the first format's.
fn side_by_side(
    args: &GenerateArgs,
    ready: &Ready,
    runs: &[(KvFormat, Generation)],
    console: &mut Console<'_>,
) -> Result<()> {
    let Some((first, wanted)) = runs.first() else {
        return Ok(());
    };
    for (i, prompt) in args.prompts.iter().enumerate() {
        console.table(format_args!("{prompt}\n"))?;
        console.table(format_args!(
            "| K/V | as {first} for | text |\n|---|---|---|"
        ))?;
        for (format, run) in runs {
            let pairs = run.texts[i].iter().zip(&wanted.texts[i]);
            let same = pairs.take_while(|(a, b)| a == b).count();
            let text = ready.tokenizer.decode(&run.texts[i])?;
            let text = text.replace('\n', " ").replace('|', "\\|");
            console.table(format_args!("| {format} | {same} tokens | {text} |"))?;
        }
        console.table("")?;
    }
    Ok(())
}

/// Runs a model over texts in every format; whether every divergence is a number.
pub fn perplexity(
    args: &PerplexityArgs,
    console: &mut Console<'_>,
    backends: &Backends,
) -> Result<bool> {
    let inputs = [args.model.file.inputs()?, args.text.clone()].concat();
    let plot = args.plot.as_deref();
    let plot = plot.map(|path| Target::new(path, args.force, &inputs));
    let plot = plot.transpose()?;
    let ready = args.model.open_compared(backends, console)?;
    let encoded = |path: &PathBuf| encoded(&ready.tokenizer, path);
    let texts: Vec<Vec<u32>> = args.text.iter().map(encoded).collect::<Result<_>>()?;
    let pieces = pieces(args, &ready, &texts)?;
    let formats: Vec<_> = args.kv.iter().map(|format| format.0).collect();
    let total: usize = pieces.iter().map(|piece| piece.len()).sum();
    let bar = bar("predicting", total as u64);
    let products = args.model.file.products;
    let comparison = Comparison {
        model: &ready.model,
        reference: ready.reference.as_ref(),
        backend: Arc::clone(&ready.backend),
        formats: &formats,
        centres: !args.no_centres,
        k_bias: args.k_bias,
        chunk: args.model.file.chunk(),
    };
    let results = attn_llm::perplexity(&comparison, &pieces, &mut |done| {
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    console.table(&ready.device)?;
    console.table(format_args!(
        "{} pieces of {} tokens, products in {products}\n",
        pieces.len(),
        args.tokens
    ))?;
    console.table(HEADER)?;
    for result in &results {
        console.table(line(result))?;
    }
    let values: Vec<Value> = results.iter().map(fidelity_value).collect();
    console.value(&json!({
        "device": ready.device, "products": products.to_string(), "tokens": args.tokens, "pieces": pieces.len(), "centres": !args.no_centres, "k_bias": args.k_bias,
        "formats": values,
    }))?;
    if let Some(plot) = plot {
        plot.write(crate::plot::fidelity(&results)?.as_bytes())?;
    }
    let is_number = |f: &Fidelity| f.mean_kl.is_finite() && f.perplexity.is_finite();
    Ok(results.iter().all(is_number))
}

/// The tokens of a text file.
pub(crate) fn encoded(tokenizer: &Tokenizer, path: &Path) -> Result<Vec<u32>> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read {} as text; check the path", path.display()))?;
    Ok(tokenizer.encode(&text)?)
}

/// The first pieces of each text, one of each text after another.
fn pieces<'a>(
    args: &PerplexityArgs,
    ready: &Ready,
    texts: &'a [Vec<u32>],
) -> Result<Vec<&'a [u32]>> {
    let (tokens, limit) = (args.tokens as usize, ready.model.config().context);
    if tokens > limit {
        let needed = tokens;
        return Err(attn_llm::Error::Context { needed, limit }.into());
    }
    let mut pieces = Vec::new();
    for i in 0..args.pieces as usize {
        for (text, path) in texts.iter().zip(&args.text) {
            let end = i.saturating_add(1).saturating_mul(tokens);
            ensure!(
                end <= text.len(),
                "{} has {} tokens, but {} pieces of {tokens} are asked for; take fewer or shorter ones (--pieces, --tokens)",
                path.display(),
                text.len(),
                args.pieces
            );
            pieces.push(&text[end - tokens..end]);
        }
    }
    (!pieces.is_empty())
        .then_some(pieces)
        .ok_or_else(|| anyhow!("there is no text; name one with --text FILE"))
}

const HEADER: &str = "\
| K/V | bytes per token | perplexity | KL × 1000 | 99th percentile × 1000 | 99.9th | same top token |
|---|---|---|---|---|---|---|";

fn line(result: &Fidelity) -> String {
    format!(
        "| {} | {:.0} | {:.3} | {:.3} | {:.2} | {:.2} | {:.2} % |",
        result.name(),
        result.bytes_per_token,
        result.perplexity,
        result.mean_kl * 1e3,
        result.p99_kl * 1e3,
        result.p999_kl * 1e3,
        result.same_top * 100.0
    )
}

fn fidelity_value(result: &Fidelity) -> Value {
    let pieces: Vec<Value> = result
        .mean_kl_of_pieces
        .iter()
        .copied()
        .map(number)
        .collect();
    json!({
        "kv": result.name(), "bytes_per_token": number(result.bytes_per_token), "perplexity": number(result.perplexity),
        "mean_kl": number(result.mean_kl), "mean_kl_of_pieces": pieces, "p99_kl": number(result.p99_kl), "p999_kl": number(result.p999_kl),
        "same_top": number(result.same_top),
    })
}
