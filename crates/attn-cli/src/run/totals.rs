//! What `attn run` says of a format: errors and times, summed over a file's layers.

use attn::KvFormat;
use serde_json::{Value, json};

use crate::figures::{Difference, gb_per_s, greater, number};

/// What the layers of a file came to in one format.
#[derive(Default)]
pub(super) struct Totals {
    pub(super) layers: usize,
    pub(super) bytes_per_token: f64,
    pub(super) compression: f64,
    pub(super) difference: Difference,
    pub(super) lse_error: f64,
    pub(super) seconds: f64,
    pub(super) bytes: f64,
}

/// What is printed of a format.
#[derive(Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) bytes_per_token: f64,
    pub(super) compression: f64,
    pub(super) output_error: f64,
    pub(super) lse_error: f64,
    pub(super) us_per_step: f64,
    pub(super) gb_per_s: f64,
}

impl Totals {
    /// Adds one layer's.
    pub(super) fn add(&mut self, layer: &Totals) {
        self.layers += layer.layers;
        self.bytes_per_token = layer.bytes_per_token;
        self.compression = layer.compression;
        self.difference.merge(&layer.difference);
        self.lse_error = greater(self.lse_error, layer.lse_error);
        self.seconds += layer.seconds;
        self.bytes += layer.bytes;
    }

    /// One layer's errors and time, for JSON.
    pub(super) fn layer_value(&self, name: &str) -> Value {
        let figures = self.figures();
        json!({
            "layer": name, "output_error": number(figures.output_error), "lse_error": number(figures.lse_error),
            "us_per_step": number(figures.us_per_step),
        })
    }

    pub(super) fn figures(&self) -> Figures {
        let us = self.seconds * 1e6;
        Figures {
            bytes_per_token: self.bytes_per_token,
            compression: self.compression,
            output_error: self.difference.relative(),
            lse_error: self.lse_error,
            us_per_step: us / self.layers as f64,
            gb_per_s: gb_per_s(self.bytes, us),
        }
    }
}

pub(super) const HEADER: &str = "\
| K/V | bytes per token | compression | output error | LSE error | µs per step | GB/s |
|---|---|---|---|---|---|---|";

impl Figures {
    /// Whether the errors are numbers at all.
    pub(super) fn are_finite(&self) -> bool {
        self.output_error.is_finite() && self.lse_error.is_finite()
    }

    pub(super) fn line(&self, format: KvFormat) -> String {
        format!(
            "| {format} | {:.1} | {:.2}x | {:.3} % | {:.1e} | {:.0} | {:.2} |",
            self.bytes_per_token,
            self.compression,
            self.output_error * 100.0,
            self.lse_error,
            self.us_per_step,
            self.gb_per_s
        )
    }

    pub(super) fn value(&self, format: KvFormat, layers: &[Value]) -> Value {
        json!({
            "kv": format.to_string(), "layers": layers,
            "bytes_per_token": number(self.bytes_per_token), "compression": number(self.compression),
            "output_error": number(self.output_error), "lse_error": number(self.lse_error),
            "us_per_step": number(self.us_per_step), "gb_per_s": number(self.gb_per_s),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_all_layers_and_times_of_one() {
        let totals = Totals {
            layers: 4,
            bytes_per_token: 132.0,
            compression: 1.94,
            difference: Difference::of(&[3.0], &[2.0]),
            lse_error: 0.25,
            seconds: 2e-3,
            bytes: 6e6,
        };
        let figures = totals.figures();
        let format: KvFormat = "int8".parse().unwrap();
        assert_eq!(
            figures.line(format),
            "| int8 | 132.0 | 1.94x | 50.000 % | 2.5e-1 | 500 | 3.00 |"
        );
        let value = figures.value(format, &[]);
        for (key, want) in [
            ("bytes_per_token", 132.0),
            ("compression", 1.94),
            ("output_error", 0.5),
            ("lse_error", 0.25),
            ("us_per_step", 500.0),
            ("gb_per_s", 3.0),
        ] {
            assert_eq!(value[key], want, "{key}");
        }
    }

    #[test]
    fn totals_are_those_of_their_layers_together() {
        let layer = |got: f32, lse_error, seconds| Totals {
            layers: 1,
            bytes_per_token: 132.0,
            compression: 1.94,
            difference: Difference::of(&[got], &[2.0]),
            lse_error,
            seconds,
            bytes: 3e6,
        };
        let (a, b) = (layer(3.0, 0.25, 1e-3), layer(2.0, 0.5, 3e-3));
        let mut both = Totals::default();
        both.add(&a);
        both.add(&b);
        let figures = both.figures();
        // One of two equal norms is off by half: the root of 1 / (4 + 4).
        assert!((figures.output_error - 0.125f64.sqrt()).abs() < 1e-12);
        assert_eq!((figures.lse_error, figures.us_per_step), (0.5, 2000.0));
        assert_eq!((figures.bytes_per_token, figures.gb_per_s), (132.0, 1.5));
        let value = b.layer_value("layer07");
        assert_eq!(value["layer"], "layer07");
        assert_eq!(
            (&value["lse_error"], &value["output_error"]),
            (&json!(0.5), &json!(0.0))
        );
    }
}
