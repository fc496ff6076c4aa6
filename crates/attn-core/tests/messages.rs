//! `docs/errors.md`: every error as a user reads it, from calls that are refused. `ATTN_UPDATE=1 cargo test -p attn-core --test messages` writes it again.

use std::{
    any::Any,
    collections::BTreeSet,
    env,
    fmt::Write,
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use attn_conformance::fake::{failure, limited};
use attn_core::{
    Append, AttnState, BackendId, CacheConfig, DecodeStep, DeviceMemory, Dtype, Error, ErrorKind,
    Heads, HostPages, KvCache, KvFormat, KvSource, KvView, PageLayout, Plan, Problem, Rotary,
    RotaryScaling, RotaryTable, Rows, RowsMut, Scheme, SequenceImage, StridedRows, Unsupported,
    all_on_device,
    convert::{ExternalRows, RowFormat, import, rows::q8_0_row},
    internals::order_free_pages,
};

const DIM: usize = 64;
const HEADS: Heads = Heads {
    q: 2,
    kv: 1,
    dim: DIM,
};
/// Elements of a token's K.
const ROW: usize = DIM;

fn config(format: &str) -> CacheConfig {
    CacheConfig::builder(format.parse().unwrap(), HEADS)
        .unit_tensor_scales()
        .sequences(3)
        .pages(20)
        .build()
}

fn cache_of(config: CacheConfig) -> KvCache {
    let store = HostPages::new(&config).unwrap();
    KvCache::new(config, Box::new(store)).unwrap()
}

/// A cache whose sequence 0 has so many tokens.
fn filled(format: &str, tokens: usize) -> KvCache {
    let mut cache = cache_of(config(format));
    append(&mut cache, 0, tokens).unwrap();
    cache
}

fn append(cache: &mut KvCache, sequence: usize, tokens: usize) -> Result<(), Error> {
    let x = vec![0.5; tokens * cache.config().num_kv_heads * cache.config().head_dim];
    cache.append(sequence, &x, &x)
}

/// Why a step over a cache's first sequences is refused, with queries of one value.
fn attend(cache: &KvCache, problem: &Problem, format: &str, q: f32) -> Error {
    let plan = Plan::new("cpu", problem, format.parse().unwrap(), ()).unwrap();
    let q = vec![q; problem.elements()];
    let mut out = q.clone();
    let step = DecodeStep::new(&plan, &q, KvSource::Cache(cache), &mut out);
    step.err().unwrap()
}

fn problem(lens: &[usize]) -> Problem {
    Problem::new(HEADS, lens)
}

type Refusal = (&'static str, Error);

fn parsed() -> Vec<Refusal> {
    let format = |name: &str| name.parse::<KvFormat>().unwrap_err();
    vec![
        ("a format with a space behind it", format("int8 ")),
        ("a format whose V has no such scheme", format("int8/int3")),
        (
            "a format with a control character",
            format("\u{1b}[31mint8"),
        ),
        ("a format as long as a file", format(&"int8".repeat(1000))),
        ("a scheme", "INT8".parse::<Scheme>().unwrap_err()),
        ("a backend", "gpu".parse::<BackendId>().unwrap_err()),
    ]
}

fn problems() -> Vec<Refusal> {
    let with = |change: fn(&mut Problem)| {
        let mut problem = problem(&[5, 3]);
        change(&mut problem);
        problem.check().unwrap_err()
    };
    vec![
        ("a head_dim of 72", with(|p| p.head_dim = 72)),
        (
            "3 query heads of 2 KV heads",
            with(|p| (p.num_q_heads, p.num_kv_heads) = (3, 2)),
        ),
        ("65 query heads of a KV head", with(|p| p.num_q_heads = 65)),
        (
            "2^17 KV heads",
            with(|p| (p.num_q_heads, p.num_kv_heads) = (1 << 17, 1 << 17)),
        ),
        (
            "a sequence of more than 2^20 tokens",
            with(|p| p.kv_lens[0] = (1 << 20) + 1),
        ),
        ("2^40 query tokens", with(|p| p.q_lens = vec![1 << 40; 2])),
        (
            "query tokens of 3 sequences for 2",
            with(|p| p.q_lens = vec![1; 3]),
        ),
        (
            "more tokens that follow than a sequence has",
            with(|p| p.tokens_after = vec![0, 1 << 20]),
        ),
        (
            "a softmax scale of 1e30",
            with(|p| p.scores.softmax_scale = Some(1e30)),
        ),
        ("a soft cap of 0", with(|p| p.scores.softcap = Some(0.0))),
        (
            "a slope of infinity",
            with(|p| p.scores.alibi_slopes = Some(vec![0.5, f32::INFINITY])),
        ),
        (
            "a sink of NaN",
            with(|p| p.scores.sinks = Some(vec![f32::NAN, 0.0])),
        ),
        (
            "a slope for each KV head",
            with(|p| p.scores.alibi_slopes = Some(vec![0.5])),
        ),
        (
            "a shard that ends inside a span",
            problem(&[100])
                .tokens_after([5])
                .check_shards()
                .unwrap_err(),
        ),
    ]
}

fn configs() -> Vec<Refusal> {
    let with = |format: &str, change: fn(&mut CacheConfig)| {
        let mut config = config(format);
        change(&mut config);
        config.check().unwrap_err()
    };
    vec![
        ("pages of 48 tokens", with("int8", |c| c.page_size = 48)),
        ("no KV head", with("int8", |c| c.num_kv_heads = 0)),
        ("2^40 pages", with("int8", |c| c.num_pages = 1 << 40)),
        (
            "2^25 sequences",
            with("int8", |c| c.num_sequences = 1 << 25),
        ),
        ("no layer", with("int8", |c| c.layers = 0)),
        (
            "pages that no kernel addresses",
            with("f16", |c| {
                (c.num_kv_heads, c.head_dim, c.page_size) = (65536, 256, 128)
            }),
        ),
        (
            "a pool of more than all memory",
            with("f16", |c| {
                (c.num_q_heads, c.num_kv_heads) = (65536, 65536);
                (c.layers, c.num_pages) = (1024, u32::MAX as usize);
            }),
        ),
        (
            "int8-g32 with a head_dim of 80",
            with("int8-g32", |c| c.head_dim = 80),
        ),
        ("int4-g8 with a head_dim of 64", with("int4-g8", |_| ())),
        (
            "a format of static scales, and none given",
            with("fp8", |c| c.k_tensor_scales.clear()),
        ),
        (
            "the same of int8-tensor for V, in 32 layers",
            with("int8/int8-tensor", |c| {
                (c.layers, c.v_tensor_scales) = (32, Vec::new());
            }),
        ),
        (
            "static scales of two heads, and one KV head",
            with("fp8", |c| c.v_tensor_scales = vec![0.5; 2]),
        ),
        (
            "static scales for a format that has none",
            with("int8", |c| c.k_tensor_scales = vec![0.5]),
        ),
        (
            "a static scale of 0",
            with("fp8", |c| c.v_tensor_scales[0] = 0.0),
        ),
    ]
}

fn appends() -> Vec<Refusal> {
    let mut cache = filled("int8", 100);
    let mut with = |at: usize, value: f32| {
        let (mut k, v) = (vec![0.5; 3 * ROW], vec![0.5; 3 * ROW]);
        k[at] = value;
        cache.append(0, &k, &v).unwrap_err()
    };
    let numbers = [
        ("K with NaN in token 2", with(2 * ROW + 5, f32::NAN)),
        ("K of 1e31 in int8", with(ROW + 63, 1e31)),
    ];
    let mut layers = config("int8");
    layers.layers = 3;
    let mut layers = cache_of(layers);
    let twice = [Append {
        sequence: 1,
        tokens: 2,
    }; 2];
    let too_long = [Append {
        sequence: 0,
        tokens: (1 << 20) - 99,
    }];
    let wide = vec![0.5; 3 * 2 * ROW];
    let rows = Rows::strided(&wide, [3, 2, DIM], [2 * ROW, DIM]).unwrap();
    let mut all = Vec::from(numbers);
    all.extend([
        (
            "K of 2 heads for a cache of one",
            cache.append(0, rows, rows).unwrap_err(),
        ),
        (
            "V of fewer tokens than K",
            cache.append(0, &wide[..2 * ROW], &wide[..ROW]).unwrap_err(),
        ),
        (
            "more tokens than the pool has room for",
            append(&mut cache, 1, 2000).unwrap_err(),
        ),
        (
            "more tokens than a sequence has",
            cache.append_with(&too_long, |_, _| Ok(())).unwrap_err(),
        ),
        (
            "a device that fails in an append, and again when old residuals are written back",
            failed_twice(),
        ),
        (
            "a sequence beyond the last",
            append(&mut cache, 7, 1).unwrap_err(),
        ),
        (
            "a sequence of 2^64 - 1",
            append(&mut cache, usize::MAX, 1).unwrap_err(),
        ),
        (
            "a sequence named twice",
            cache.append_with(&twice, |_, _| Ok(())).unwrap_err(),
        ),
        (
            "an append to a cache of 3 layers",
            append(&mut layers, 0, 1).unwrap_err(),
        ),
    ]);
    all
}

/// An append to a full pool, whose new pages are old residual pages.
fn failed_twice() -> Error {
    let heads = Heads {
        q: 1,
        kv: 1,
        dim: DIM,
    };
    let builder = CacheConfig::builder(KvFormat::INT4, heads);
    let fails = Arc::new(AtomicBool::new(false));
    let has_failed = fails.clone();
    let mut cache = limited(builder.max_len(640).build(), move |_, count| {
        if has_failed.load(Ordering::Relaxed) {
            0
        } else {
            count
        }
    });
    append(&mut cache, 0, 380).unwrap();
    fails.store(true, Ordering::Relaxed);
    let tokens = [Append {
        sequence: 0,
        tokens: 260,
    }];
    let failed = cache.append_with(&tokens, |_, _| Err(failure("writing tokens")));
    failed.unwrap_err()
}

fn steps() -> Vec<Refusal> {
    let mut layers = config("int8");
    layers.layers = 2;
    let mut cache = cache_of(layers);
    let (one, row) = (
        [Append {
            sequence: 0,
            tokens: 1,
        }],
        [0.5; ROW],
    );
    let early = cache.write(0, &row, &row).unwrap_err();
    cache.reserve(&one).unwrap();
    cache.write(0, &row, &row).unwrap();
    vec![
        ("a write without a step", early),
        ("a second step", cache.reserve(&one).unwrap_err()),
        (
            "a layer that is written twice",
            cache.write(0, &row, &row).unwrap_err(),
        ),
        (
            "a layer that the cache lacks",
            cache.write(2, &row, &row).unwrap_err(),
        ),
        (
            "attention to a layer that is not written",
            cache
                .layer(1)
                .unwrap()
                .check_queries(&problem(&[1]))
                .unwrap_err(),
        ),
        (
            "a fork of a sequence that grows",
            cache.fork(0, 1).unwrap_err(),
        ),
        (
            "attention that names no layer",
            cache.check_queries(&problem(&[1])).unwrap_err(),
        ),
    ]
}

fn attention() -> Vec<Refusal> {
    let cache = filled("int8", 100);
    let mut prompt = filled("int4", 300);
    let long = attend(&prompt, &problem(&[300]).q_len(300), "int4", 0.5);
    prompt.drop_before(0, 200).unwrap();
    let wide = Heads { dim: 128, ..HEADS };
    let chosen = cache.sequences(&[0, 1]).unwrap();
    let (plan, q) = (
        Plan::new("cpu", &problem(&[100]), KvFormat::INT8, ()).unwrap(),
        [0.5; 3 * ROW],
    );
    let mut out = [0.0; 2 * ROW];
    let short = DecodeStep::new(&plan, &q, KvSource::Cache(&cache), &mut out)
        .err()
        .unwrap();
    vec![
        (
            "a plan of another format",
            attend(&cache, &problem(&[100]), "int4", 0.5),
        ),
        (
            "a plan of another head_dim",
            attend(&cache, &Problem::new(wide, [100]), "int8", 0.5),
        ),
        (
            "a plan for shorter sequences",
            attend(&cache, &problem(&[64]), "int8", 0.5),
        ),
        (
            "a plan for more sequences than the cache has",
            attend(&cache, &problem(&[100, 0, 0, 0]), "int8", 0.5),
        ),
        (
            "a plan for one sequence, and two that are chosen",
            chosen.check_problem(&problem(&[100])).unwrap_err(),
        ),
        (
            "queries of NaN",
            attend(&cache, &problem(&[100]), "int8", f32::NAN),
        ),
        (
            "queries of 1e30",
            attend(&cache, &problem(&[100]), "int8", 1e30),
        ),
        ("queries of another number", short),
        (
            "a prompt of 300 tokens over int4, of which the cache keeps residuals for the newest",
            long,
        ),
        (
            "queries that see dropped tokens",
            attend(&prompt, &problem(&[300]), "int4", 0.5),
        ),
    ]
}

fn sequences() -> Vec<Refusal> {
    let mut cache = filled("int4", 700);
    append(&mut cache, 1, 3).unwrap();
    let mut dropped = filled("int8", 700);
    dropped.drop_before(0, 300).unwrap();
    let order = order_free_pages(&mut dropped, &[0, 0]).unwrap_err();
    vec![
        (
            "a truncation beyond the residuals",
            cache.truncate(0, 100).unwrap_err(),
        ),
        (
            "a truncation into dropped tokens",
            dropped.truncate(0, 100).unwrap_err(),
        ),
        (
            "a truncation to more tokens than there are",
            cache.truncate(0, 701).unwrap_err(),
        ),
        (
            "a drop of more tokens than there are",
            cache.drop_before(0, 1 << 40).unwrap_err(),
        ),
        (
            "a copy of a sequence with dropped tokens",
            dropped.read_back(0).unwrap_err(),
        ),
        (
            "a fork onto a sequence with tokens",
            cache.fork(0, 1).unwrap_err(),
        ),
        ("a fork onto itself", cache.fork(0, 0).unwrap_err()),
        (
            "a page behind the pool's last",
            cache.write_page(20, &[]).unwrap_err(),
        ),
        ("a page of no bytes", cache.write_page(0, &[]).unwrap_err()),
        ("an order of pages that are not free", order),
    ]
}

fn images() -> Vec<Refusal> {
    let mut cache = filled("fp8", 70);
    append(&mut cache, 1, 1).unwrap();
    let image = cache.image(0).unwrap();
    let restored = |change: fn(&mut CacheConfig)| {
        let mut config = config("fp8");
        change(&mut config);
        cache_of(config).restore(0, &image).unwrap_err()
    };
    let damaged = |at: usize, value: u8| {
        let mut bytes = image.as_bytes().to_vec();
        bytes[at] = value;
        SequenceImage::from_bytes(bytes).unwrap_err()
    };
    let mut pages = cache.read_back(0).unwrap();
    pages[0][3] = 0x7f;
    let mut free = filled("fp8", 0);
    vec![
        (
            "an image of another page size",
            restored(|c| c.page_size = 32),
        ),
        (
            "an image of other static scales",
            restored(|c| c.v_tensor_scales[0] = 0.5),
        ),
        (
            "an image for a sequence with tokens",
            cache.restore(1, &image).unwrap_err(),
        ),
        (
            "another file",
            SequenceImage::from_bytes(&b"PK\x03\x04, which is a zip"[..]).unwrap_err(),
        ),
        ("an image of a later version", damaged(8, 9)),
        (
            "an image that was cut off",
            SequenceImage::from_bytes(&image.as_bytes()[..200]).unwrap_err(),
        ),
        ("an image with a changed byte", damaged(300, 1)),
        (
            "pages with NaN",
            free.restore_pages(0, 70, &pages).unwrap_err(),
        ),
    ]
}

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

fn rows() -> Vec<Refusal> {
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

fn states() -> Vec<Refusal> {
    let none = RotaryScaling::None;
    let zero = RotaryScaling::Linear { factor: 0.0 };
    let table = Rotary::new(DIM, 1e4, &none).unwrap();
    vec![
        (
            "a state with a log-sum-exp of NaN",
            AttnState::new(1, vec![0.5; 2], vec![0.5, f32::NAN]).unwrap_err(),
        ),
        (
            "outputs that cannot be added",
            AttnState::new(1, vec![3e38], vec![0.5]).unwrap_err(),
        ),
        (
            "a rotary_dim of 63",
            Rotary::new(63, 1e4, &none).unwrap_err(),
        ),
        (
            "a rotary base of 0",
            Rotary::new(DIM, 0.0, &none).unwrap_err(),
        ),
        (
            "a scaling of positions by 0",
            Rotary::new(DIM, 1e4, &zero).unwrap_err(),
        ),
        (
            "cosines of infinity",
            RotaryTable::from_cos_sin(2, &[0.0, f32::INFINITY]).unwrap_err(),
        ),
        (
            "a table of all positions",
            table.table(0..usize::MAX).unwrap_err(),
        ),
    ]
}

/// What only backends find: their fields are examples.
fn backends() -> Vec<Refusal> {
    let store = HostPages::new(&config("int4")).unwrap();
    let unsupported = [
        Unsupported::Absent {
            backend: "cuda",
            reason: "no NVIDIA driver was found".into(),
            next_step: "install the driver, or use backend \"cpu\"".into(),
        },
        Unsupported::NotBuilt { backend: "wgpu" },
        Unsupported::NoKernel {
            backend: "wgpu",
            what: "head_dim 256 in f16".into(),
            built: "head_dims up to 192".into(),
        },
        Unsupported::Undefined {
            backend: "cuda",
            reason: problem(&[1]).softcap(0.0).check().unwrap_err().to_string(),
        },
        Unsupported::Forked,
    ];
    let shard = problem(&[1024])
        .tokens_after([5])
        .check_whole("wgpu")
        .unwrap_err();
    let names: Vec<_> = unsupported
        .iter()
        .map(|reason| reason.variant().0)
        .collect();
    let all: Vec<_> = Unsupported::VARIANTS.iter().map(|row| row.0).collect();
    assert_eq!(names, all, "an example for each variant of Unsupported");
    let mut list = vec![
        (
            "a store of another format than the config's",
            KvCache::new(config("int8"), Box::new(store)).err().unwrap(),
        ),
        (
            "a cache of another backend",
            Error::WrongBackend {
                backend: "cuda",
                what: "cache",
            },
        ),
        (
            "a failure of the device, with its own error behind it",
            Error::Device {
                backend: "cuda",
                doing: "copying the results",
                source: "CUDA_ERROR_LAUNCH_FAILED".into(),
            },
        ),
        (
            "a shard, on a backend that takes whole sequences",
            shard.into(),
        ),
    ];
    list.extend(
        unsupported.map(|reason| ("a backend that is absent, or has no kernel", reason.into())),
    );
    list
}

/// `CACHE_FULL` of `CacheFull`.
fn screaming(name: &str) -> String {
    let mut text = String::new();
    for (i, c) in name.char_indices() {
        if i > 0 && c.is_uppercase() {
            text.push('_');
        }
        text.extend(c.to_uppercase());
    }
    text
}

fn page() -> String {
    let groups = [
        parsed(),
        problems(),
        configs(),
        appends(),
        steps(),
        attention(),
        sequences(),
        images(),
        rows(),
        states(),
        backends(),
    ];
    let all: Vec<Refusal> = groups.into_iter().flatten().collect();
    let mut page = String::from(
        "# Errors\n\n\
         <!-- ATTN_UPDATE=1 cargo test -p attn-core --test messages -->\n\n\
         Every variant of `attn::Error`, with the sentence that users read, from calls that were refused. A refused call changes nothing. The status of the C \
         interface and the exception of the Python package follow the variant's kind (`Error::kind`); both give the same sentence, with the causes of a \
         device's failure behind it.\n",
    );
    for (variant, kind) in Error::VARIANTS {
        let name = format!("{kind:?}");
        let status = screaming(&name);
        write!(page, "\n## {variant}\n\nC: `ATTN_STATUS_{status}`. Python: `attn.{name}Error`.\n\n| call | error |\n|---|---|\n").unwrap();
        let mut examples = all
            .iter()
            .filter(|(_, error)| error.variant().0 == *variant)
            .peekable();
        assert!(
            examples.peek().is_some(),
            "a call that is refused with Error::{variant} belongs on the page"
        );
        for (call, error) in examples {
            let sentence = error.to_string().replace('|', "\\|");
            writeln!(page, "| {call} | {sentence} |").unwrap();
        }
    }
    page
}

#[test]
fn the_page_of_errors_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors.md");
    let page = page();
    if env::var("ATTN_UPDATE").is_ok_and(|update| update == "1") {
        fs::write(&path, &page).unwrap();
    }
    let current = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        current == page,
        "docs/errors.md is old; run ATTN_UPDATE=1 cargo test -p attn-core --test messages"
    );
}

#[test]
fn sentences_can_be_read() {
    let kinds: BTreeSet<String> = Error::VARIANTS
        .iter()
        .map(|(_, kind)| format!("{kind:?}"))
        .collect();
    assert_eq!(
        kinds.len(),
        8,
        "each kind of error has a variant: {kinds:?}"
    );
    assert_eq!(
        ErrorKind::CacheFull,
        filled("int8", 0)
            .append(0, &vec![0.5; 2000 * ROW], &vec![0.5; 2000 * ROW])
            .unwrap_err()
            .kind()
    );
    for line in page().lines().filter(|line| line.starts_with("| ")) {
        assert!(!line.chars().any(char::is_control), "{line:?}");
        let digits = line
            .split(|c: char| !c.is_ascii_digit())
            .map(str::len)
            .max();
        assert!(digits <= Some(20), "{line}");
        assert!(line.len() < 600, "{line}");
    }
}
