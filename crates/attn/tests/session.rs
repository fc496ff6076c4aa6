//! What a session waits for, on a backend whose device only writes down what it is asked for.

use std::{
    any::Any,
    sync::{Arc, Mutex},
};

use attn::{
    Append, Attend, AttendRows, Attended, CacheAccess, CacheConfig, DeviceMemory, DeviceResults,
    DeviceRows, DeviceSteps, Dtype, Error, HeadDim, Heads, KvFormat, PageStore, Rows, RowsMut,
    SelectedPages, Session, SpanRows, SpanStates, TokenWrite,
};
use attn_conformance::fake::{FakeBackend, FakePages, failure};

const HEADS: Heads = Heads {
    q: 2,
    kv: 1,
    dim: HeadDim::same(64),
};

/// What was done, in order; and the writes on the device that succeed before one fails, if one does.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<&'static str>>>, Arc<Mutex<Option<usize>>>);

impl Log {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A backend that attends nothing, on the host or on its device, and notes each access to pages.
fn noted(log: &Log) -> FakeBackend {
    let [pages, step, spans, device] = [(); 4].map(|()| log.clone());
    FakeBackend::idle("noted")
        .with_caches(move |config| {
            let pages = pages.clone();
            let noted = FakePages::new(config)?.with_notes(move || pages.note("pages"));
            noted.hidden().cache()
        })
        .with_execute(move |_, _| {
            step.note("pages");
            Ok(())
        })
        .with_spans(move |call| {
            spans.note("pages");
            SpanStates::unseen(call.inputs().problem())
        })
        .with_device_steps(move |_| {
            device.note("prepare");
            Ok(Box::new(NotedSteps(device.clone())))
        })
}

struct NotedSteps(Log);

impl DeviceSteps for NotedSteps {
    fn check_write(&mut self, _: [DeviceRows<'_>; 2]) -> Result<(), Error> {
        self.0.note("check");
        Ok(())
    }
    fn order_store(&mut self) -> Result<(), Error> {
        self.0.note("order");
        Ok(())
    }
    fn write(
        &mut self,
        _: &CacheAccess,
        _: &dyn PageStore,
        _: usize,
        writes: &[TokenWrite],
        kv: [DeviceRows<'_>; 2],
    ) -> Result<(), Error> {
        assert!(kv.iter().all(|rows| rows.shape()[0] >= writes.len()));
        self.0.note("write");
        match &mut *self.0.1.lock().unwrap() {
            Some(0) => Err(failure("writing tokens")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
    fn attend(
        &mut self,
        attended: &Attended<'_>,
        q: DeviceRows<'_>,
        results: DeviceResults<'_>,
    ) -> Result<(), Error> {
        assert_eq!(q.shape(), attended.problem().q_shape());
        match results {
            DeviceResults::Rows { out, lse } => {
                assert_eq!(out.shape(), attended.problem().out_shape());
                let lse = lse.map_or(attended.lse_rows(), |lse| lse.shape());
                assert_eq!(lse, attended.lse_rows());
            }
            DeviceResults::Spans { spans, max_sums, o } => {
                let shapes = [max_sums, o].map(|rows| rows.shape());
                assert_eq!(shapes, attended.state_rows(spans));
            }
        }
        self.0.note("attend");
        Ok(())
    }
    fn wait(&self) -> Result<(), Error> {
        self.0.note("wait");
        Ok(())
    }
}

/// Numbers on a device of this name.
#[derive(Debug)]
struct There(&'static str, usize);

impl DeviceMemory for There {
    fn elements(&self) -> usize {
        self.1
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

const MEMORY: There = There("noted:0", 4096);

fn there(tokens: usize, heads: usize) -> Rows<'static> {
    Rows::on_device(&MEMORY, [1, tokens, heads, 64], [0, 64 * heads, 64]).unwrap()
}

fn there_mut(tokens: usize, heads: usize, dim: usize) -> RowsMut<'static> {
    let (shape, strides) = ([1, tokens, heads, dim], [0, heads * dim, dim]);
    RowsMut::on_device(&MEMORY, shape, strides).unwrap()
}

fn session(layers: usize) -> (Session, Log) {
    session_of(KvFormat::INT8, layers)
}

fn session_of(format: KvFormat, layers: usize) -> (Session, Log) {
    let log = Log::default();
    let config = CacheConfig::builder(format, HEADS)
        .centres(false)
        .unit_tensor_scales()
        .layers(layers)
        .sequences(3)
        .max_len(128)
        .build();
    (Session::new(Arc::new(noted(&log)), &config).unwrap(), log)
}

fn one(sequence: usize) -> [Append; 1] {
    [Append {
        sequence,
        tokens: 1,
    }]
}

#[test]
fn whatever_touches_pages_from_the_host_waits_for_the_device() {
    type Call = fn(&mut Session) -> Result<(), Error>;
    let calls: [(&str, Call); 11] = [
        ("append", |s| s.append(&one(0), &[0.5; 64], &[2.0; 64])),
        ("attend", |s| {
            let mut out = [0.0; 128];
            s.attend(
                &Attend::new(2, &[0]),
                AttendRows::new(&[0.5; 128], &mut out),
            )
        }),
        ("span_states", |s| {
            s.span_states(&Attend::new(2, &[0]), &[0.5; 128]).map(drop)
        }),
        ("add_pages", |s| s.add_pages(1)),
        ("image", |s| s.image(0).map(drop)),
        ("write_image", |s| {
            let mut bytes = vec![0; s.image_bytes(0)?];
            s.write_image(0, &mut bytes)
        }),
        ("restore", |s| {
            let image = s.image(0)?;
            s.free(1)?;
            s.restore(1, &image)
        }),
        ("read_back", |s| s.read_back(0).map(drop)),
        ("restore_pages", |s| {
            let pages = s.read_back(0)?;
            s.free(1)?;
            s.restore_pages(1, s.tokens(0)?, &pages)
        }),
        ("copy", |s| s.copy().map(drop)),
        ("export", |s| s.export(0, 0).map(drop)),
    ];
    for (name, call) in calls {
        let (mut session, log) = session(1);
        // Without calls on the device nothing waits.
        session.append(&one(0), &[0.5; 64], &[2.0; 64]).unwrap();
        call(&mut session).unwrap();
        assert!(!log.take().contains(&"wait"), "{name}");
        session.append(&one(0), there(1, 1), there(1, 1)).unwrap();
        assert_eq!(log.take(), ["prepare", "check", "order", "write"]);
        call(&mut session).unwrap();
        let done = log.take();
        assert_eq!(done.first(), Some(&"wait"), "{name}: {done:?}");
        assert!(done.contains(&"pages"), "{name}: {done:?}");
        let is_ordered = |pair: &[&str]| pair[0] == "wait" || pair[1] != "write";
        assert!(done.windows(2).all(is_ordered), "{name}: {done:?}");
    }
}

/// Attention on the device may still read the centres of a sequence that was freed since, and the store writes others in their place.
#[test]
fn a_fork_and_a_shard_write_centres_of_k_behind_the_calls_on_the_device() {
    type Call = fn(&mut Session) -> Result<(), Error>;
    let calls: [(&str, Call, usize); 2] = [
        ("fork", |s| s.fork(0, 1), 2),
        (
            "begin_shard",
            |s| {
                let centres = s.config().layers * s.config().centres_bytes();
                s.begin_shard(1, 1024, &vec![0; centres])
            },
            1,
        ),
    ];
    for (name, call, accesses) in calls {
        let log = Log::default();
        let config = CacheConfig::builder(KvFormat::INT8, HEADS)
            .sequences(2)
            .max_len(128)
            .build();
        assert!(config.centres);
        let mut session = Session::new(Arc::new(noted(&log)), &config).unwrap();
        for sequence in [0, 1] {
            session
                .append(&one(sequence), there(1, 1), there(1, 1))
                .unwrap();
        }
        let rows = AttendRows::new(there(1, 2), there_mut(1, 2, 64));
        session.attend(&Attend::new(2, &[1]), rows).unwrap();
        session.free(1).unwrap();
        log.take();
        call(&mut session).unwrap();
        let mut behind = vec!["order"];
        behind.extend(vec!["pages"; accesses]);
        assert_eq!(log.take(), behind, "{name}");
    }
    // Without centres a fork touches nothing on the device.
    let (mut session, log) = session(1);
    session.append(&one(0), there(1, 1), there(1, 1)).unwrap();
    log.take();
    session.fork(0, 1).unwrap();
    assert_eq!(log.take(), [""; 0]);
}

#[test]
fn a_step_on_the_device_is_ordered_there_and_taken_back_behind_it() {
    let (mut session, log) = session(2);
    session.reserve(&one(0)).unwrap();
    session.write(1, there(1, 1), there(1, 1)).unwrap();
    assert_eq!(log.take(), ["prepare", "check", "write"]);
    let at = Attend {
        layer: 1,
        ..Attend::new(2, &[0])
    };
    let rows = AttendRows {
        q: there(1, 2),
        out: there_mut(1, 2, 64),
        lse: Some(there_mut(1, 2, 1)),
    };
    session.attend(&at, rows).unwrap();
    assert_eq!(log.take(), ["attend"]);
    let rows = SpanRows {
        q: there(1, 2),
        spans: 3,
        max_sums: there_mut(3, 2, 2),
        o: there_mut(3, 2, 64),
    };
    session.attend_spans(&at, rows).unwrap();
    assert_eq!(log.take(), ["attend"]);
    // The host writes the other layer.
    session.write(0, &[0.5; 64], &[2.0; 64]).unwrap();
    assert_eq!(log.take(), ["wait", "pages"]);
    session.reserve(&one(0)).unwrap();
    assert_eq!(log.take(), ["order"]);
    session.cancel_step().unwrap();
    assert_eq!(log.take(), ["wait"]);
    assert_eq!(session.table().lens, [1, 0, 0]);
}

/// Of two parts that a sequence's first tokens are with centres of K, the second fails.
#[test]
fn an_append_that_fails_on_the_device_is_taken_back_behind_its_parts_there() {
    let log = Log::default();
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .max_len(128)
        .build();
    let mut session = Session::new(Arc::new(noted(&log)), &config).unwrap();
    *log.1.lock().unwrap() = Some(1);
    let append = [Append {
        sequence: 0,
        tokens: 3,
    }];
    session
        .append(&append, there(3, 1), there(3, 1))
        .unwrap_err();
    assert_eq!(
        log.take(),
        ["prepare", "check", "order", "write", "write", "order"]
    );
    assert_eq!(session.table().lens, [0]);
    *log.1.lock().unwrap() = None;
    session.append(&append, there(3, 1), there(3, 1)).unwrap();
    assert_eq!(log.take(), ["check", "order", "write", "write"]);
}

#[test]
fn rows_of_a_call_that_lie_apart_or_do_not_fit_change_nothing() {
    let (mut session, log) = session(1);
    let said = |refused: Result<(), Error>| {
        let error = refused.unwrap_err();
        let is_named = matches!(error, Error::Rows { .. } | Error::Shape { .. });
        assert!(is_named, "{error}");
        error.to_string()
    };
    let mixed = said(session.append(&one(0), there(1, 1), &[2.0; 64]));
    assert!(
        mixed.starts_with("v lies in host memory; needed"),
        "{mixed}"
    );
    let other = said(session.append(&one(0), &[2.0; 64], there(1, 1)));
    assert!(other.starts_with("v lies on noted:0; needed"), "{other}");
    assert_eq!(log.take(), [""; 0]);
    let longer = said(session.append(&one(0), there(2, 1), there(2, 1)));
    assert!(
        longer.starts_with("k has rows of the shape [2, 1, 64]"),
        "{longer}"
    );
    assert_eq!(log.take(), ["prepare"]);
    assert_eq!(session.table().lens, [0, 0, 0]);

    session.append(&one(0), there(1, 1), there(1, 1)).unwrap();
    log.take();
    let at = Attend::new(2, &[0]);
    let mut out = [7.0; 128];
    let mixed = said(session.attend(&at, AttendRows::new(there(1, 2), &mut out)));
    assert!(
        mixed.starts_with("out lies in host memory; needed"),
        "{mixed}"
    );
    let rows = AttendRows::new(&[0.5; 128], &mut out).with_lse(there_mut(1, 2, 1));
    let mixed = said(session.attend(&at, rows));
    assert!(mixed.starts_with("lse lies on noted:0; needed"), "{mixed}");
    let few = said(session.attend(&at, AttendRows::new(there(1, 2), there_mut(2, 2, 64))));
    assert!(
        few.starts_with("out has rows of the shape [2, 2, 64]"),
        "{few}"
    );
    assert_eq!((log.take(), out), (vec![], [7.0; 128]));
    // Fewer spans than the tokens need, more than any sequence has.
    for spans in [0, 1025] {
        let (mut max_sums, mut o) = (vec![0.0; 4 * spans], vec![0.0; 128 * spans]);
        let rows = SpanRows {
            q: (&[0.5; 128]).into(),
            spans,
            max_sums: (&mut max_sums).into(),
            o: (&mut o).into(),
        };
        let refused = session.attend_spans(&at, rows);
        assert!(
            matches!(refused, Err(Error::Parameter { what: "spans", .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn numbers_on_a_device_are_not_counted_where_they_can_saturate() {
    for (format, counted) in [("fp8", None), ("int8", Some(0))] {
        let (mut session, _) = session_of(format.parse().unwrap(), 1);
        session.append(&one(0), &[500.0; 64], &[2.0; 64]).unwrap();
        let here = if counted.is_none() { 64 } else { 0 };
        assert_eq!(session.saturated(), Some(here), "{format}");
        session.append(&one(0), there(1, 1), there(1, 1)).unwrap();
        assert_eq!(session.saturated(), counted, "{format}");
    }
    let (mut session, _) = session_of("f16".parse().unwrap(), 2);
    session.reserve(&one(0)).unwrap();
    session.write(1, there(1, 1), there(1, 1)).unwrap();
    assert_eq!(session.saturated(), None);
}

#[test]
fn a_backend_without_device_memory_refuses_rows_there_by_its_name() {
    let backend = attn::open(attn::BackendId::Cpu).unwrap();
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .centres(false)
        .max_len(64)
        .build();
    let mut session = Session::new(backend.into(), &config).unwrap();
    let refused = session.append(&one(0), there(1, 1), there(1, 1));
    let said = refused.unwrap_err().to_string();
    assert!(
        said.contains("rows in host memory, as backend cpu"),
        "{said}"
    );
    session.append(&one(0), &[0.5; 64], &[2.0; 64]).unwrap();
    assert_eq!(session.table().lens, [1]);
}

#[test]
fn states_of_spans_go_into_memory_of_more_spans_and_results_into_rows_of_any_type() {
    let backend = attn::open(attn::BackendId::Cpu).unwrap();
    let config = CacheConfig::builder(KvFormat::INT8, HEADS)
        .centres(false)
        .max_len(64)
        .build();
    let mut session = Session::new(backend.into(), &config).unwrap();
    session.append(&one(0), &[0.5; 64], &[2.0; 64]).unwrap();
    let (at, q) = (Attend::new(2, &[0]), [0.25; 128]);
    let states = session.span_states(&at, &q).unwrap();
    let (mut max_sums, mut o) = ([7.0; 8], [7.0; 256]);
    let rows = SpanRows {
        q: (&q).into(),
        spans: 2,
        max_sums: (&mut max_sums).into(),
        o: (&mut o).into(),
    };
    session.attend_spans(&at, rows).unwrap();
    assert_eq!(max_sums[..4], *states.max_sums());
    assert_eq!(o[..128], *states.o());
    assert_eq!(max_sums[4..], [f32::NEG_INFINITY; 4]);
    assert_eq!(o[128..], [0.0; 128]);
    // Log-sum-exps are never rounded.
    let (mut out, mut lse, mut wide) = ([half(0.0); 128], [half(0.0); 2], [0.0; 2]);
    let refused = session.attend(&at, AttendRows::new(&q, &mut out).with_lse(&mut lse));
    assert!(
        matches!(refused, Err(Error::Rows { what: "lse", .. })),
        "{refused:?}"
    );
    let rows = AttendRows::new(&q, &mut out).with_lse(&mut wide);
    session.attend(&at, rows).unwrap();
    assert!(out.iter().all(|x| (x.to_f32() - 2.0).abs() < 0.02));
    // One token of K 0.5 and 64 queries of 0.25, scaled by 1/8.
    assert!(wide.iter().all(|x| (x - 1.0).abs() < 0.01), "{wide:?}");
}

fn half(x: f32) -> half::f16 {
    half::f16::from_f32(x)
}

/// A query token is one of each KV head then; kills the caller's shape as it is, and heads of other strides.
#[test]
fn rows_of_selected_pages_are_split_by_kv_heads() {
    let heads = Heads::new(4, 2, 64);
    let config = CacheConfig::builder(KvFormat::INT8, heads)
        .sequences(2)
        .max_len(256)
        .page_size(64)
        .centres(false)
        .build();
    let backend = attn::Device::open(attn::BackendId::Cpu.into()).unwrap();
    let mut session = Session::new(Arc::new(backend), &config).unwrap();
    let tokens: Vec<f32> = (0..150 * 2 * 64)
        .map(|i| (i % 97) as f32 * 0.02 - 1.0)
        .collect();
    for sequence in 0..2 {
        let append = [Append {
            sequence,
            tokens: 150,
        }];
        session.append(&append, &tokens, &tokens).unwrap();
    }
    let selected = SelectedPages {
        pages: &[0, 1, 2, 1, 0, 1, 2],
        counts: &[3, 1, 1, 2],
    };
    let at = Attend {
        pages: Some(selected),
        ..Attend::new(4, &[0, 1])
    };
    let q: Vec<f32> = (0..2 * 4 * 64)
        .map(|i| (i % 31) as f32 * 0.1 - 1.5)
        .collect();
    let (mut side_by_side, mut lse) = (vec![0.0; 2 * 4 * 64], vec![0.0; 2 * 4]);
    let rows = AttendRows::new(&q[..], &mut side_by_side[..]).with_lse(&mut lse[..]);
    session.attend(&at, rows).unwrap();
    // KV head 0 of the first sequence has all of its pages.
    let mut whole = vec![0.0; 2 * 4 * 64];
    let rows = AttendRows::new(&q[..], &mut whole[..]);
    session.attend(&Attend::new(4, &[0, 1]), rows).unwrap();
    assert_eq!(side_by_side[..2 * 64], whole[..2 * 64]);
    assert_ne!(side_by_side[2 * 64..4 * 64], whole[2 * 64..4 * 64]);
    assert!(lse.iter().all(|lse| lse.is_finite()));
    // All rows equally far apart.
    let mut apart = vec![0.0; 2 * 4 * 80];
    let out = RowsMut::strided(&mut apart[..], [2, 4, 64], [4 * 80, 80]).unwrap();
    session.attend(&at, AttendRows::new(&q[..], out)).unwrap();
    for (row, want) in side_by_side.chunks(64).enumerate() {
        assert_eq!(&apart[row * 80..][..64], want, "row {row}");
    }
    // Tokens further apart than heads.
    let mut apart = vec![0.0; 2 * 500];
    let out = RowsMut::strided(&mut apart[..], [2, 4, 64], [500, 64]).unwrap();
    let error = session
        .attend(&at, AttendRows::new(&q[..], out))
        .unwrap_err();
    assert!(matches!(error, Error::Rows { what: "out", .. }), "{error}");
    assert_eq!(apart, vec![0.0; 2 * 500]);
    let error = session.span_states(&at, &q[..]).unwrap_err();
    assert!(error.to_string().contains("selected pages"), "{error}");
}
