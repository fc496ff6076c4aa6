//! Tests of a backend that may be absent, for test targets with `harness = false`: one visible test for each, and for each case of the table.

use std::sync::{Arc, Mutex};

use attn_core::{DecodeAttention, Unsupported};
use libtest_mimic::{Completion, Trial};

use crate::{
    case::Case,
    check::{Outcome, Report, check_case},
};

/// The width of the longest name of a case's test.
pub const COLUMNS: usize = 80;

/// Tests of one backend, opened once.
///
/// Where the backend is absent they become one test that is ignored with the reason, or fails if `ATTN_REQUIRE` names the backend.
pub struct Trials<B> {
    name: &'static str,
    opened: Result<Arc<B>, Unsupported>,
    trials: Vec<Trial>,
    count: usize,
}

impl<B: Send + Sync + 'static> Trials<B> {
    /// No tests yet, of the backend that was opened or not; `name` is what `ATTN_REQUIRE` calls it, and begins the tests' names.
    pub fn new(name: &'static str, opened: Result<B, Unsupported>) -> Self {
        Trials {
            name,
            opened: opened.map(Arc::new),
            trials: Vec::new(),
            count: 0,
        }
    }

    /// The backend, if it is present.
    pub fn backend(&self) -> Option<&Arc<B>> {
        self.opened.as_ref().ok()
    }

    /// Adds a test, which fails by a panic.
    #[must_use]
    pub fn test(self, name: impl AsRef<str>, run: impl FnOnce(&B) + Send + 'static) -> Self {
        self.add(name.as_ref(), |backend| {
            run(backend);
            Ok(Completion::Completed)
        })
    }

    fn add(
        mut self,
        name: &str,
        run: impl FnOnce(&B) -> Result<Completion, libtest_mimic::Failed> + Send + 'static,
    ) -> Self {
        self.count += 1;
        if let Ok(backend) = &self.opened {
            let (name, backend) = (format!("{}/{name}", self.name), backend.clone());
            self.trials
                .push(Trial::ignorable_test(name, move || run(&backend)));
        }
        self
    }

    /// The tests.
    pub fn finish(self) -> Vec<Trial> {
        let Err(reason) = self.opened else {
            return self.trials;
        };
        let required = std::env::var("ATTN_REQUIRE").unwrap_or_default();
        let is_required = required.split(',').any(|name| name == self.name);
        let (name, reason) = (
            format!("{}/{} tests", self.name, self.count),
            reason.to_string(),
        );
        vec![Trial::ignorable_test(name, move || {
            if is_required {
                return Err(format!("ATTN_REQUIRE={required}, but {reason}").into());
            }
            Ok(Completion::ignored_with(reason))
        })]
    }
}

/// What the cases of one backend came to, as far as they were run.
#[derive(Clone, Default)]
pub struct Outcomes(Arc<Mutex<Vec<(Case, Outcome)>>>);

impl Outcomes {
    /// The report over all cases that were run, in the table's order.
    pub fn report(&self) -> Report {
        let mut all = self
            .0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        all.sort_by_key(|(case, _)| case.seed);
        Report::new(all.iter().map(|(case, outcome)| (case, outcome)))
    }
}

impl Trials<Box<dyn DecodeAttention>> {
    /// Adds a test for each of some cases, named by [`Case::label`]; a failure prints the whole case. A test is ignored where the backend has no kernel and need not have one.
    #[must_use]
    pub fn cases<R>(mut self, reference: &Arc<R>, cases: Vec<Case>, outcomes: &Outcomes) -> Self
    where
        R: DecodeAttention + 'static,
    {
        for case in cases {
            let (reference, outcomes) = (reference.clone(), outcomes.clone());
            let columns = COLUMNS - self.name.len() - "/".len();
            self = self.add(&case.label(columns), move |backend| {
                let outcome = check_case(&*reference, &**backend, &case);
                let mut all = outcomes
                    .0
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                all.push((case, outcome.clone()));
                match outcome {
                    Outcome::Passed(_) => Ok(Completion::Completed),
                    Outcome::Refused(reason) => Ok(Completion::ignored_with(reason)),
                    Outcome::Failed(text) => Err(text.into()),
                }
            });
        }
        self
    }
}
