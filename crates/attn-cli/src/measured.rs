//! What `attn bench` measures of a workload: the rows of its table and of its charts.

use attn_bench::{Measured, Timing, Workload};

/// What a workload took, or why there is no figure.
pub type Outcome = Result<Figures, String>;

/// One workload on one device.
pub struct Row {
    /// The number of the timer.
    pub device: usize,
    /// What was to be measured.
    pub workload: Workload,
    /// What it took, or why there is no figure.
    pub outcome: Outcome,
    /// Operations a second of the dot product of 8-bit integers alone, where the timer measures that.
    pub peak: Option<f64>,
}

impl Row {
    /// 10^12 operations of both products a second, where the work takes so many microseconds; of an append none count.
    pub fn tflop_per_s(&self, us: f64) -> f64 {
        if self.workload.operation.is_append_alone() {
            return 0.0;
        }
        self.workload.decode_flops() / us / 1e6
    }
}

/// The figures that rates are made of, with what they were chosen from.
pub struct Figures {
    /// All of it.
    pub measured: Measured,
    /// Microseconds of the work.
    pub us: f64,
    /// Microseconds of the plain read.
    pub read_us: f64,
}

impl Figures {
    /// By the medians of a quiet clock, else by the fastest.
    pub fn new(measured: Measured, by_median: bool) -> Self {
        let of = |timing: Timing| if by_median { timing.median } else { timing.min };
        Figures {
            us: of(measured.step),
            read_us: of(measured.ceiling),
            measured,
        }
    }

    /// The share of the read ceiling that the step reaches.
    pub fn share(&self) -> f64 {
        self.read_us / self.us
    }
}
