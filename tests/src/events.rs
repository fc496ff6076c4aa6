//! A subscriber that keeps what it is told, for tests of events and spans.

use std::{
    fmt,
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tracing::{
    Dispatch, Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
    subscriber::NoSubscriber,
};

/// An event, or a span that was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The target.
    pub target: String,
    /// The level.
    pub level: Level,
    /// The event's message, or the span's name.
    pub message: String,
    /// The other fields in their order, as texts.
    pub fields: Vec<(&'static str, String)>,
}

impl Told {
    /// The text of a field.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.fields.iter();
        fields.find(|(of, _)| *of == name).map(|(_, x)| &**x)
    }
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.fields.push((name, format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.push((field.name(), value.to_owned()));
    }
}

/// Keeps events and spans of the library's targets.
struct Recorder {
    most: LevelFilter,
    told: Arc<Mutex<Vec<Told>>>,
    spans: AtomicU64,
}

impl Recorder {
    fn keep(&self, of: &Metadata<'_>, record: impl FnOnce(&mut Told)) {
        let mut told = Told {
            target: of.target().to_owned(),
            level: *of.level(),
            message: of.name().to_owned(),
            fields: Vec::new(),
        };
        record(&mut told);
        let mut all = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(told);
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        *of.level() <= self.most && of.target().starts_with("attn::")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.most)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.keep(span.metadata(), |told| span.record(told));
        Id::from_u64(1 + self.spans.fetch_add(1, Ordering::Relaxed))
    }

    fn event(&self, event: &Event<'_>) {
        self.keep(event.metadata(), |told| event.record(told));
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Beside a lone subscriber, `tracing` asks only the calling thread's whether an event is ever wanted: a thread of another test, which has none, would
/// answer no for all. Beside this one it asks all.
static BESIDE: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// What this thread is told while `run` runs, of levels up to `most`; and what `run` gives.
pub fn told<T>(most: Level, run: impl FnOnce() -> T) -> (Vec<Told>, T) {
    LazyLock::force(&BESIDE);
    let told = Arc::new(Mutex::new(Vec::new()));
    let recorder = Recorder {
        most: LevelFilter::from_level(most),
        told: told.clone(),
        spans: AtomicU64::new(0),
    };
    let given = tracing::subscriber::with_default(recorder, run);
    let told = std::mem::take(&mut *told.lock().unwrap_or_else(PoisonError::into_inner));
    (told, given)
}
