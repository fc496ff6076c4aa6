//! The names of schemes and formats, as they are written and read.

use std::{fmt, str::FromStr};

use crate::{
    error::{Error, refuse},
    format::{Int8Scale, KvFormat, Scheme, Window},
};

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::F16 => f.write_str("f16"),
            Scheme::Bf16 => f.write_str("bf16"),
            Scheme::Fp8E4m3 => f.write_str("fp8"),
            Scheme::Int8(Int8Scale::Token) => f.write_str("int8-plain"),
            Scheme::Int8(Int8Scale::Group32) => f.write_str("int8-g32"),
            Scheme::Int8(Int8Scale::Tensor) => f.write_str("int8-tensor"),
            Scheme::Int4(g) => write!(f, "int4-g{g}"),
            Scheme::RotatedInt8 => f.write_str("int8"),
            Scheme::RotatedInt4 { groups, window } => {
                f.write_str("int4")?;
                if *groups != 1 {
                    write!(f, "-r{groups}")?;
                }
                match window {
                    Window::Two => Ok(()),
                    other => write!(f, "-w{}", other.tiles()),
                }
            }
        }
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        Scheme::named(s).ok_or_else(|| Error::parameter("scheme", s, NAMES))
    }
}

/// The names of schemes, for errors.
const NAMES: &str = "f16, bf16, fp8, int8, int8-plain, int8-g32, int8-tensor, int4 (and int4-r2, -r4, -r8 with more groups, each also with -w0 or -w4 for another \
                     window), int4-g1, int4-g2, int4-g4, int4-g8; of a format also two of them, K's and V's, such as int8/int4; \
                     int8-latents, int8-plain-latents, bf16-latents, f16-latents and fp8-latents for latents, whose V is the first elements of K";

/// Behind the name of a scheme: of latents.
const LATENTS: &str = "-latents";

impl Scheme {
    fn named(name: &str) -> Option<Self> {
        let windows = [Window::None, Window::Two, Window::Four];
        let rotated = [1, 2, 4, 8]
            .into_iter()
            .flat_map(|groups| windows.map(|window| Scheme::rotated_int4(groups, window)));
        let mut all = Scheme::ALL.into_iter().chain(rotated);
        all.find(|scheme| scheme.to_string() == name)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            KvFormat { k, latents, .. } if latents => write!(f, "{k}{LATENTS}"),
            KvFormat { k, v, .. } if k == v => k.fmt(f),
            KvFormat { k, v, .. } => write!(f, "{k}/{v}"),
        }
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        if let Some(scheme) = s.strip_suffix(LATENTS).and_then(Scheme::named) {
            return match scheme.has_latents() {
                true => Ok(KvFormat {
                    latents: true,
                    ..KvFormat::same(scheme)
                }),
                false => refuse("format", s, NAMES),
            };
        }
        let (k, v) = s.split_once('/').unwrap_or((s, s));
        match (Scheme::named(k), Scheme::named(v)) {
            (Some(k), Some(v)) => Ok(KvFormat::new(k, v)),
            _ => refuse("format", s, NAMES),
        }
    }
}
