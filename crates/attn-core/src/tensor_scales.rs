//! Static scales, one for each KV head of schemes such as fp8 and int8-tensor: the one place that refuses them.
//!
//! A scale of 1 that nobody asked for saturates or rounds away most of K and V, so that scales are given, and what has none is refused
//! ([`CacheBuilder::unit_tensor_scales`](crate::CacheBuilder::unit_tensor_scales) asks for 1).

use crate::{
    error::{Error, Given, refuse},
    format::{KvFormat, Scheme},
    layout::Side,
    score_modifiers::SCALES,
};

impl Side {
    /// The name of a side's static scales, in errors of every interface.
    #[must_use]
    pub fn scales(self) -> &'static str {
        match self {
            Side::K => "k_scales",
            Side::V => "v_scales",
        }
    }
}

impl KvFormat {
    /// Refuses static scales of K and of V, as [`Scheme::check_scales`] does; and of latents scales of V that are not those of K, whose codes V has.
    ///
    /// # Errors
    /// Those of [`Scheme::check_scales`]; [`Error::Parameter`].
    pub fn check_scales(self, [k, v]: [&[f32]; 2], needed: usize) -> Result<(), Error> {
        self.k.check_scales(Side::K, k, needed)?;
        self.v.check_scales(Side::V, v, needed)?;
        match k.iter().zip(v).position(|(k, v)| k != v) {
            Some(i) if self.latents => {
                let given = format_args!("{} at index {i}", Given::from(v[i]));
                refuse(Side::V.scales(), given, "those of K, whose codes are V's")
            }
            _ => Ok(()),
        }
    }
}

impl Scheme {
    /// Refuses static scales of K or of V that are missing, too few or too many, or no scales. `needed` is what a scheme with static scales has: one for
    /// each KV head of each layer.
    ///
    /// # Errors
    /// [`Error::MissingScales`], [`Error::ScaleCount`]; [`Error::Parameter`] for a scale beyond 1e-15 to 1e15.
    pub fn check_scales(self, side: Side, scales: &[f32], needed: usize) -> Result<(), Error> {
        self.check_scale_count(side, scales.len(), needed)?;
        match scales.iter().position(|s| !SCALES.contains(s)) {
            Some(i) => {
                let given = format_args!("{} at index {i}", Given::from(scales[i]));
                refuse(side.scales(), given, "1e-15 to 1e15")
            }
            None => Ok(()),
        }
    }

    /// Refuses static scales as [`Scheme::check_scales`] does, by their number alone: for scales in a device's memory.
    ///
    /// # Errors
    /// [`Error::MissingScales`], [`Error::ScaleCount`].
    pub fn check_scale_count(self, side: Side, given: usize, needed: usize) -> Result<(), Error> {
        let needed = if self.has_tensor_scale() { needed } else { 0 };
        let (what, scheme) = (side.scales(), self);
        match given {
            _ if given == needed => Ok(()),
            0 => Err(Error::MissingScales {
                what,
                scheme,
                needed,
            }),
            _ => Err(Error::ScaleCount {
                what,
                scheme,
                given,
                needed,
            }),
        }
    }
}
