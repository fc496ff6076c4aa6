//! The options of the backend, and the environment variables that set them.

use attn_core::{Settings, Unsupported};
use attn_kernels::wgsl::decode::Tuning;

use crate::error::BACKEND;

/// Which of an adapter's features and limits a backend asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AdapterFeatures {
    /// `all`: the adapter's own limits, and those of its features that the backend uses.
    #[default]
    All,
    /// `none`: WebGPU's default limits and no optional feature, as a browser would offer.
    None,
}

/// Options of a [`WgpuBackend`](crate::WgpuBackend). `tuning` changes speed, never bits.
///
/// ```
/// use attn_wgpu::{AdapterFeatures, Options};
///
/// let options = Options::default().adapter("llvmpipe").features(AdapterFeatures::None);
/// assert_eq!(options.adapter.as_deref(), Some("llvmpipe"));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Part of the name of the adapter to use, in any case; `None`: discrete before integrated before software.
    /// `ATTN_WGPU=adapter=NAME`.
    pub adapter: Option<String>,
    /// Features and limits to ask the adapter for. `ATTN_WGPU=features=all` or `none`.
    pub features: AdapterFeatures,
    /// Choices that change speed. `ATTN_WGPU=items=auto`, `tiles` or `segments` sets [`Tuning::by_tiles`].
    pub tuning: Tuning,
}

impl Options {
    /// Reads the settings of `ATTN_WGPU`: `adapter`, `features` and `items`. Those that it does not give keep their defaults.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that is not allowed.
    pub fn from_env() -> Result<Self, Unsupported> {
        let features = |text: &str| match text {
            "all" => Ok(AdapterFeatures::All),
            "none" => Ok(AdapterFeatures::None),
            _ => Err("all, none".to_owned()),
        };
        let items = |text: &str| match text {
            "auto" => Ok(None),
            "tiles" => Ok(Some(true)),
            "segments" => Ok(Some(false)),
            _ => Err("auto, tiles, segments".to_owned()),
        };
        let keys = ["adapter", "features", "items"];
        let settings = Settings::from_env(BACKEND, "ATTN_WGPU", &keys)?;
        let mut tuning = Tuning::default();
        tuning.by_tiles = settings.get("items", items)?.flatten();
        Ok(Options {
            adapter: settings.get("adapter", |name| Ok(name.to_owned()))?,
            features: settings.get("features", features)?.unwrap_or_default(),
            tuning,
        })
    }

    /// Chooses the first adapter whose name contains `part`, in any case.
    #[must_use]
    pub fn adapter(mut self, part: impl Into<String>) -> Self {
        self.adapter = Some(part.into());
        self
    }

    /// Says which features and limits to ask the adapter for.
    #[must_use]
    pub fn features(mut self, features: AdapterFeatures) -> Self {
        self.features = features;
        self
    }

    /// Sets the split of one workgroup: a single tile (`true`), or a segment.
    #[must_use]
    pub fn by_tiles(mut self, by_tiles: bool) -> Self {
        self.tuning.by_tiles = Some(by_tiles);
        self
    }

    /// Sets all choices that change speed.
    #[must_use]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.tuning = tuning;
        self
    }
}
