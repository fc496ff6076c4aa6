//! What `attn bench` measures of a workload: the rows of its table, of its JSON, and of the charts of `attn-eval plot`.

use attn_bench::{Measured, Timing, Workload};
use serde_json::{Value, json};

use crate::figures::{gb_per_s, number};

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

    /// The figures as JSON, or the reason why there are none; `device` is the timer's name, `bf16_us` the time of the same workload in bf16.
    pub fn value(&self, device: &str, bf16_us: Option<f64>) -> Value {
        let bytes = self.workload.bytes() as f64;
        let mut value =
            json!({ "device": device, "shape": self.workload.to_string(), "bytes": bytes });
        let Value::Object(map) = &mut value else {
            return value;
        };
        let mut put = |name: &str, x: Value| map.insert(name.to_owned(), x);
        match &self.outcome {
            Ok(f) => {
                put("us", number(f.us));
                put("tflop_per_s", number(self.tflop_per_s(f.us)));
                if let Some(peak) = self.peak {
                    put("peak_tflop_per_s", number(peak / 1e12));
                }
                put("us_min", number(f.measured.step.min));
                put("us_median", number(f.measured.step.median));
                put("gb_per_s", number(gb_per_s(bytes, f.us)));
                put("read_us", number(f.read_us));
                put("read_us_min", number(f.measured.ceiling.min));
                put("read_us_median", number(f.measured.ceiling.median));
                put("share", number(f.share()));
                put("bf16_us", bf16_us.map_or(Value::Null, number));
            }
            Err(reason) => {
                put("reason", json!(reason));
            }
        }
        value
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
