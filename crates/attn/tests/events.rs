//! Which backend is used, and why others are not, as a subscriber is told.

use attn::{
    Append, Attend, AttendRows, BackendId, Device, DeviceName, Heads, KvFormat, Session, events,
};
use attn_conformance::events::told;
use tracing::Level;

#[test]
fn the_chosen_backend_is_told_and_each_that_was_refused() {
    let (said, selection) = told(Level::DEBUG, || attn::select(None).unwrap());
    let said: Vec<_> = said
        .iter()
        .filter(|t| t.target == events::BACKEND)
        .collect();
    let (chosen, refused) = said.split_last().unwrap();
    let info = selection.backend.device();
    assert_eq!(
        (chosen.level, &*chosen.message),
        (Level::INFO, "chosen"),
        "{said:?}"
    );
    assert_eq!(chosen.field("backend"), Some(info.backend));
    assert_eq!(chosen.field("device"), Some(&*info.name));
    assert_eq!(chosen.field("detail"), Some(&*info.detail));
    assert_eq!(refused.len(), selection.refused.len());
    for (told, (id, reason)) in refused.iter().zip(&selection.refused) {
        assert_eq!((told.level, &*told.message), (Level::DEBUG, "refused"));
        assert_eq!(told.field("backend"), Some(id.name()));
        assert_eq!(told.field("reason"), Some(&*reason.to_string()));
    }
}

#[test]
fn a_backend_that_is_opened_by_name_is_told_or_the_reason() {
    let absent = DeviceName {
        id: BackendId::Cuda,
        ordinal: 1 << 20,
    };
    let (said, opened) = told(Level::DEBUG, || Device::open(absent));
    let reason = opened.unwrap_err().to_string();
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(
        (said[0].level, &*said[0].message),
        (Level::DEBUG, "refused")
    );
    assert_eq!(said[0].field("reason"), Some(&*reason));
    // Choosing is told at info, what is refused is not.
    let (said, _) = told(Level::INFO, || {
        let _ = Device::open(absent);
        attn::open(BackendId::Cpu).unwrap();
    });
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0].field("backend"), Some("cpu"));
}

#[test]
fn plans_that_serve_again_are_not_told() {
    let backend = attn::open(BackendId::Cpu).unwrap();
    let heads = Heads::new(1, 1, 64);
    let config = attn::CacheConfig::builder(KvFormat::INT8, heads)
        .max_len(256)
        .build();
    let mut session = Session::new(backend.into(), &config).unwrap();
    let (q, mut out) = ([1.0; 64], [0.0; 64]);
    let one = Append {
        sequence: 0,
        tokens: 1,
    };
    let mut plans = Vec::new();
    for _ in 0..130 {
        session.append(&[one], &q, &q).unwrap();
        let rows = AttendRows::new(&q, &mut out);
        let (said, attended) = told(Level::DEBUG, || {
            session.attend(&Attend::new(heads.q, &[0]), rows)
        });
        attended.unwrap();
        plans.extend(said.into_iter().map(|t| {
            assert_eq!((&*t.target, &*t.message), (events::PLAN, "prepared"));
            t.field("longest").unwrap().to_owned()
        }));
    }
    // At the first step, and where the sequence outgrows the plan.
    assert_eq!(plans, ["64", "128", "192"]);
}

#[test]
fn the_first_numbers_that_saturate_are_told_once_for_each_cache() {
    let backend = attn::open(BackendId::Cpu).unwrap();
    let heads = Heads::new(1, 1, 64);
    let builder = attn::CacheConfig::builder("fp8".parse().unwrap(), heads).max_len(64);
    let config = builder.tensor_scales([0.01], [0.01]).build();
    let mut session = Session::new(backend.into(), &config).unwrap();
    let one = Append {
        sequence: 0,
        tokens: 1,
    };
    let mut append = |x: f32| {
        let (said, done) = told(Level::WARN, || session.append(&[one], &[x; 64], &[1.0; 64]));
        done.unwrap();
        (said, session.saturated())
    };
    assert_eq!(append(4.48), (vec![], Some(0)));
    let (said, saturated) = append(4.7);
    assert_eq!((said.len(), saturated), (1, Some(64)), "{said:?}");
    assert_eq!(
        (&*said[0].target, &*said[0].message),
        (events::CACHE, "saturated")
    );
    assert_eq!(said[0].level, Level::WARN);
    let field = |name| said[0].field(name).unwrap();
    assert_eq!(
        [field("values"), field("layer"), field("format")],
        ["64", "0", "fp8"]
    );
    assert!(
        field("advice").contains("raise k_scales or v_scales"),
        "{said:?}"
    );
    assert_eq!(append(1e9), (vec![], Some(128)));
}

/// Kills a warning at every look, one that waits for rows on the host, and one without a remedy.
#[test]
fn keys_with_outlier_channels_are_told_once_for_each_cache() {
    let backend = attn::open(BackendId::Cpu).unwrap();
    let heads = Heads::new(1, 1, 64);
    let builder = attn::CacheConfig::builder(KvFormat::INT8, heads);
    let config = builder.max_len(2048).build();
    let mut session = Session::new(backend.into(), &config).unwrap();
    let mut append = |tokens: usize| {
        let mut k: Vec<f32> = (0..tokens * 64)
            .map(|i| (i * i % 61) as f32 - 30.0)
            .collect();
        // Every other token's key is far from the centre in one channel.
        k.iter_mut().skip(9).step_by(128).for_each(|x| *x += 2000.0);
        let appends = [Append {
            sequence: 0,
            tokens,
        }];
        let (said, done) = told(Level::WARN, || session.append(&appends, &k, &k));
        done.unwrap();
        (said, session.outlier_notice())
    };
    let (said, notice) = append(100);
    assert_eq!((said.len(), notice), (0, None));
    let (said, notice) = append(100);
    let [event] = &said[..] else {
        panic!("{said:?}");
    };
    let found = (&*event.target, &*event.message, event.level);
    assert_eq!(found, (events::CACHE, "outlier channels", Level::WARN));
    let field = |name| event.field(name).unwrap().to_owned();
    assert_eq!([field("layer"), field("format")], ["0", "int8"]);
    assert_eq!(Some(field("advice")), notice);
    assert!(field("advice").contains("bf16"), "{said:?}");
    let ratio: f32 = field("ratio").parse().unwrap();
    assert!(ratio > 10.0, "{ratio}");
    // The look at 1024 tokens says no more.
    assert_eq!(append(1000), (vec![], notice));
}
