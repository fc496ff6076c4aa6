//! The decode kernels, how a CTA of each is configured, and the limits that a device sets.

use std::{fmt, str::FromStr};

use attn_core::arithmetic;

/// Query rows of a row group: the columns of an MMA.
pub const GROUP_ROWS: usize = 8;

/// Teams of a CTA of `split_kv.cu`; each attends a segment of the span, or a tile of the segment.
pub(crate) const TEAMS: usize = arithmetic::SPAN;

/// Threads of a team of `low_latency.cu`: four warps that share its tiles, and a producer warp.
pub(crate) const TEAM_THREADS: usize = 160;

/// Teams of `low_latency.cu` that run on an SM at once, in one CTA or two.
pub(crate) const SM_TEAMS: usize = 2;

/// Warpgroups of a CTA of `many_rows.cu` that attend rows: three where a team has three, else two.
pub(crate) const WARPGROUPS: usize = 2;

/// Warpgroups of a CTA of `many_rows.cu` whose teams have so many.
pub(crate) fn warpgroups(of_team: usize) -> usize {
    of_team.max(WARPGROUPS)
}

/// Shared memory per CTA of an architecture with the bulk copy engine; no other architecture has as much.
pub(crate) const BULK_SHARED: usize = 227 * 1024;

/// Shared memory that the device reserves in every CTA.
pub(crate) const RESERVED_SHARED: usize = 1024;

/// A decode kernel. Each is the fastest for some problems; all give the same bits of integer formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// `split_kv.cu`: a persistent grid, for most problems.
    SplitKv,
    /// `low_latency.cu`, whose CTAs of a work item merge through a thread block cluster: few or short sequences.
    LowLatencyCluster,
    /// `low_latency.cu`, whose CTAs of a work item merge through global memory: few long sequences.
    LowLatencyGlobal,
    /// `many_rows.cu`: more than eight query rows to each KV head, up to whole prompts. A row warp is a warpgroup there, of eight row groups.
    ManyRows,
    /// `many_rows.cu` whose teams take whole work items: where these are many, or leave no team without work for long.
    ManyRowsWhole,
}

/// As `kernel=` of `ATTN_CUDA` has it; `many_rows of items` for the one whose teams take whole work items.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kernel::SplitKv => "split_kv",
            Kernel::LowLatencyCluster => "low_latency",
            Kernel::LowLatencyGlobal => "low_latency_global",
            Kernel::ManyRows => "many_rows",
            Kernel::ManyRowsWhole => "many_rows of items",
        })
    }
}

impl Kernel {
    /// Whether this is `low_latency.cu`, where four warps share each tile.
    pub fn is_low_latency(self) -> bool {
        matches!(self, Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal)
    }

    /// Whether this is `many_rows.cu`.
    pub fn is_many_rows(self) -> bool {
        matches!(self, Kernel::ManyRows | Kernel::ManyRowsWhole)
    }
}

/// How K and V of a decode launch lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// In the library's pages, of so many tokens.
    Pages(usize),
    /// Rows of whole sequences, at any strides: a contiguous cache.
    Rows,
    /// Rows at any strides, in pages of so many tokens that a page table names: the paged cache of another engine.
    PagedRows(usize),
}

impl KvLayout {
    /// Tokens of the library's pages; 0 for rows.
    pub fn page_size(self) -> usize {
        match self {
            KvLayout::Pages(tokens) => tokens,
            KvLayout::Rows | KvLayout::PagedRows(_) => 0,
        }
    }

    /// Tokens of pages of rows; 0 for others.
    pub fn row_page_size(self) -> usize {
        match self {
            KvLayout::PagedRows(tokens) => tokens,
            KvLayout::Rows | KvLayout::Pages(_) => 0,
        }
    }

    /// Tokens that an entry of the page table stands for; 0 where there is no table.
    pub fn table_page_size(self) -> usize {
        self.page_size() + self.row_page_size()
    }

    /// Whether K and V lie as rows.
    pub fn is_rows(self) -> bool {
        self.page_size() == 0
    }
}

/// The limits of a device that determine a launch.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLimits {
    /// Bytes of shared memory that a CTA may use.
    pub shared_limit: usize,
    /// Number of streaming multiprocessors.
    pub sms: usize,
    /// Bytes that memory delivers in a microsecond by its clock and width.
    pub memory_pace: f64,
}

impl DeviceLimits {
    /// Those of a device with the memory of an H200.
    #[must_use]
    pub fn new(shared_limit: usize, sms: usize) -> Self {
        DeviceLimits {
            shared_limit,
            sms,
            memory_pace: H200_MEMORY_PACE,
        }
    }
}

/// Bytes that an H200's memory delivers in a microsecond by its clock and width: 6144 bits at 3.2 GHz, twice a cycle.
pub const H200_MEMORY_PACE: f64 = 4.9e6;

/// The caller's preferences for the choice of a kernel. They change speed, and bits of float formats and of steps that may use floats.
#[derive(Debug, Clone, Copy, Default)]
pub struct Preferences {
    /// The kernel that serves what it covers.
    pub kernel: KernelChoice,
    /// Whether to attend prompts from 16-bit pages of 64 tokens that `dequantize.cu` makes of the cache, where that is allowed and `many_rows.cu` attends them; none: where
    /// it is estimated to be faster.
    pub dequantize: Option<bool>,
    /// Whether the problem's sequences are blocks of query tokens: those of a sequence differ in length on the device as they do in the plan, which
    /// sequences need not.
    pub are_blocks: bool,
}

/// The kernel that serves every problem that it covers. Of the others `split_kv.cu` serves all that fit it, and `many_rows.cu` the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// `auto`: the kernel that is estimated to be the fastest.
    #[default]
    Auto,
    /// `split_kv`; `split_kv:GxWxSxC` in this configuration, in place of the table's: row groups, row warps, stages, CTAs.
    SplitKv(Option<KernelConfig>),
    /// `low_latency`.
    LowLatency,
    /// `low_latency_global`: `low_latency.cu` whose CTAs merge through global memory wherever they can.
    LowLatencyGlobal,
    /// `many_rows`.
    ManyRows,
}

impl KernelChoice {
    /// The configuration of `split_kv.cu` that is asked for.
    #[must_use]
    pub fn config(self) -> Option<KernelConfig> {
        match self {
            KernelChoice::SplitKv(config) => config,
            _ => None,
        }
    }
}

/// The error is what is allowed.
impl FromStr for KernelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(KernelChoice::Auto),
            "split_kv" => Ok(KernelChoice::SplitKv(None)),
            "low_latency" => Ok(KernelChoice::LowLatency),
            "low_latency_global" => Ok(KernelChoice::LowLatencyGlobal),
            "many_rows" => Ok(KernelChoice::ManyRows),
            _ => {
                let shape = text.strip_prefix("split_kv:");
                let config = shape.and_then(|shape| shape.parse().ok());
                config.map(|config| KernelChoice::SplitKv(Some(config))).ok_or_else(|| {
                    "auto, split_kv, split_kv:GxWxSxC of row groups, row warps, stages and CTAs from 1 to 64, low_latency, low_latency_global, many_rows".to_owned()
                })
            }
        }
    }
}

/// The configuration of a CTA, fixed when its kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelConfig {
    /// Kernel that is configured.
    pub kernel: Kernel,
    /// Row groups of 8 query rows in a warp (`ATTN_ROW_GROUPS`).
    pub row_groups: usize,
    /// Warps of a team, each with its own rows (`ATTN_ROW_WARPS`).
    pub row_warps: usize,
    /// Stages of a team's pipeline (`ATTN_STAGES`).
    pub stages: usize,
    /// CTAs that run on an SM at once (`ATTN_CTAS`).
    pub ctas: usize,
    /// Warpgroups of `many_rows.cu` that copy tiles and unpack their codes (`ATTN_PRODUCERS`); 0 of other kernels.
    pub producers: usize,
}

impl KernelConfig {
    /// Query rows of a CTA.
    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.row_groups * self.row_warps
    }

    /// Rows of `many_rows.cu` whose states a CTA keeps in the workspace: 64 for each warpgroup; wide ones are half as many, each in two places.
    pub fn state_rows(&self) -> usize {
        64 * warpgroups(self.row_warps)
    }

    /// Threads of a CTA, or of each of its teams in `low_latency.cu`.
    pub fn threads(&self) -> usize {
        match self.kernel {
            Kernel::SplitKv => 32 * self.row_warps * TEAMS,
            Kernel::LowLatencyCluster | Kernel::LowLatencyGlobal => TEAM_THREADS,
            Kernel::ManyRows | Kernel::ManyRowsWhole => {
                128 * (self.producers + warpgroups(self.row_warps))
            }
        }
    }
}

/// Row groups, row warps, stages and CTAs of `split_kv.cu`, such as `1x3x4x2`. The error is what is allowed.
impl FromStr for KernelConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split('x').map(|n| n.parse().ok());
        let numbers = numbers.map(|n| n.filter(|n| (1..=64).contains(n)));
        let numbers: Option<Vec<usize>> = numbers.collect();
        let Some([row_groups, row_warps, stages, ctas]) = numbers.as_deref() else {
            return Err(
                "four numbers from 1 to 64: row groups, row warps, stages, CTAs".to_owned(),
            );
        };
        Ok(KernelConfig {
            kernel: Kernel::SplitKv,
            row_groups: *row_groups,
            row_warps: *row_warps,
            stages: *stages,
            ctas: *ctas,
            producers: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_parsed_or_refused() {
        assert_eq!("auto".parse(), Ok(KernelChoice::Auto));
        let global = "low_latency_global".parse();
        assert_eq!(global, Ok(KernelChoice::LowLatencyGlobal));
        assert!("often".parse::<KernelChoice>().is_err());
        let shaped: KernelChoice = "split_kv:1x2x64x1".parse().unwrap();
        let config = shaped.config().unwrap();
        assert_eq!((config.kernel, config.stages), (Kernel::SplitKv, 64));
        for shape in ["", "1x2", "1x6x3x2x1", "1x2x65x1", "1x2x0x1", "1x2xax1"] {
            assert!(shape.parse::<KernelConfig>().is_err(), "{shape}");
            assert!(format!("split_kv:{shape}").parse::<KernelChoice>().is_err());
        }
    }
}
