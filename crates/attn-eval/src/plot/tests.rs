//! Tests of curves, marks and whole SVG files.

use attn_bench::{CacheLayout, Measured, Operation, Timing, Workload, workloads};
use attn_cli::measured::Figures;

use super::{curves::plain, *};

fn workload(name: &str) -> Workload {
    let found = workloads().into_iter().find(|s| s.to_string() == name);
    found.unwrap_or_else(|| panic!("{name} is a preset"))
}

/// A row whose step took `us` and whose read `read_us`.
fn row(device: usize, name: &str, us: f64, read_us: f64) -> Row {
    let timing = |us| Timing {
        min: us,
        median: us,
    };
    let measured = Measured {
        step: timing(us),
        ceiling: timing(read_us),
    };
    Row {
        device,
        workload: workload(name),
        outcome: Ok(Figures::new(measured, true)),
        peak: None,
    }
}

fn devices() -> Vec<String> {
    vec!["cpu: avx2, 2 threads".to_owned()]
}

/// Rows whose contexts do not come in order.
fn rows() -> Vec<Row> {
    vec![
        row(0, "context/8-2-ctx4096/int8", 80.0, 40.0),
        row(0, "context/8-2-ctx16384/int8", 200.0, 150.0),
        row(0, "context/8-2-ctx1024/int8", 50.0, 10.0),
    ]
}

fn points(curves: &[Curve]) -> Vec<(&str, &[(f64, f64)])> {
    curves
        .iter()
        .map(|c| (c.label.as_str(), &c.points[..]))
        .collect()
}

#[test]
fn latency_is_microseconds_over_tokens_in_the_order_of_tokens() {
    let curves = latency(&devices(), &rows());
    let want = [(1024.0, 50.0), (4096.0, 80.0), (16384.0, 200.0)];
    assert_eq!(points(&curves), [("8/2 int8", &want[..])]);
}

#[test]
fn share_is_percent_of_the_read_over_mebibytes() {
    let curves = share(&devices(), &rows());
    // 520 bytes per token: two KV heads, K and V, 128 codes and a scale of 2 bytes.
    let mib = |tokens: f64| tokens * 520.0 / 1_048_576.0;
    let want = [
        (mib(1024.0), 20.0),
        (mib(4096.0), 50.0),
        (mib(16384.0), 75.0),
    ];
    assert_eq!(points(&curves), [("int8", &want[..])]);
}

#[test]
fn latency_is_of_one_query_token_of_one_sequence() {
    let mut rows = rows();
    rows.push(row(0, "prefill/16-1-ctx32768-batch1/int8", 1.0, 1.0));
    rows.push(row(0, "prefill/32-8-q512-behind-32768/int8", 1.0, 1.0));
    rows.push(row(0, "prefill/32-8-q2048-behind-32768/int8", 1.0, 1.0));
    assert_eq!(latency(&devices(), &rows).len(), 1);
}

#[test]
fn time_over_query_rows_is_of_one_length_in_the_order_of_rows() {
    let rows = [
        row(0, "rows128/ctx8192-batch32/int8", 100.0, 17.0),
        row(0, "rows12/ctx8192-batch16/int8", 25.0, 17.0),
        row(0, "rows48/ctx8192-batch32/int8", 46.0, 17.0),
        // Other lengths, and a format with a single point.
        row(0, "rows12/ctx1024-batch128/int8", 1.0, 17.0),
        row(0, "rows48/ctx8192-batch32/bf16", 60.0, 30.0),
    ];
    let curves = query_rows(&devices(), &rows);
    let want = [(12.0, 25.0), (48.0, 46.0), (128.0, 100.0)];
    assert_eq!(points(&curves), [("int8", &want[..])]);
}

#[test]
fn rates_over_prompts_are_of_whole_ones_and_tell_masks_apart() {
    // 16 heads of 128 dims: four operations for each pair of a query and a token, in 1 ms.
    let rate = |pairs: f64| pairs * 16.0 * 128.0 * 4.0 / 1e9;
    let causal = |ctx: f64, batch: f64| rate(batch * ctx * (ctx + 1.0) / 2.0);
    let rows = [
        row(0, "prefill/16-1-ctx8192-batch4/int8", 1000.0, 1.0),
        row(0, "prefill/16-1-ctx1024-batch32/int8", 1000.0, 1.0),
        row(
            0,
            "prefill/16-1-ctx1024-batch32-not-causal/int8",
            1000.0,
            1.0,
        ),
        row(
            0,
            "prefill/16-1-ctx2048-batch16-not-causal/int8",
            1000.0,
            1.0,
        ),
        row(0, "prefill/16-1-ctx1024-batch32-fast/int8", 500.0, 1.0),
        row(0, "prefill/16-1-ctx8192-batch4-fast/int8", 500.0, 1.0),
        row(0, "prefill/32-8-q2048-behind-32768/int8", 1000.0, 1.0),
    ];
    let curves = prompts(&devices(), &rows);
    let all = [
        (1024.0, rate(32.0 * 1024.0 * 1024.0)),
        (2048.0, rate(16.0 * 2048.0 * 2048.0)),
    ];
    let masked = [
        (1024.0, causal(1024.0, 32.0)),
        (8192.0, causal(8192.0, 4.0)),
    ];
    let fast = masked.map(|(ctx, rate)| (ctx, 2.0 * rate));
    let want = [
        ("int8", &masked[..]),
        ("int8, no mask", &all[..]),
        ("int8, fast", &fast[..]),
    ];
    assert_eq!(points(&curves), want);
    assert_ne!(curves[0].stroke, curves[1].stroke);
    assert_ne!(curves[0].stroke, curves[2].stroke);
}

#[test]
fn charts_stand_two_to_a_line_and_take_no_room_without_curves() {
    let size = |rows: &[Row]| {
        let svg = svg(&devices(), rows).unwrap();
        let figure = |name: &str| {
            let at = svg.find(name).expect("the file has a size") + name.len();
            svg[at..].split('"').next().map(str::to_owned).unwrap()
        };
        [figure("width=\""), figure("height=\"")]
    };
    let mut all = rows();
    assert_eq!(size(&all[..1]), ["750", "560"]);
    assert_eq!(size(&all), ["1500", "560"]);
    all.push(row(0, "rows1/ctx8192-batch32/int8", 25.0, 17.0));
    all.push(row(0, "rows2/ctx8192-batch32/int8", 26.0, 17.0));
    assert_eq!(size(&all), ["1500", "1090"]);
    let svg = svg(&devices(), &all).unwrap();
    assert!(svg.contains("query rows of a KV head") && !svg.contains("TFLOP/s"));
}

#[test]
fn rows_without_a_place_on_the_axes_are_left_out() {
    let mut rows = rows();
    rows[0] = row(0, "context/8-2-ctx4096/int8", f64::NAN, 40.0);
    rows[1] = row(0, "context/8-2-ctx16384/int8", 0.0, 1.0);
    rows.push(row(0, "append/append/int8", 1.0, 1.0));
    rows.push(Row {
        outcome: Err("too large".to_owned()),
        ..row(0, "context/8-2-ctx65536/int8", 1.0, 1.0)
    });
    let curves = share(&devices(), &rows);
    assert_eq!((curves.len(), curves[0].points.len()), (1, 1));
    // One point is no curve.
    assert!(latency(&devices(), &rows).is_empty());
    let text = svg(&devices(), &rows[..1]).unwrap_err().to_string();
    assert!(text.contains("nothing to draw"), "{text}");
}

#[test]
fn devices_have_curves_of_their_own_named_by_their_last_word() {
    let devices = ["cpu: avx2, 1 thread", "cpu: avx2, 2 threads"].map(str::to_owned);
    let mut rows = rows();
    rows.push(row(1, "context/8-2-ctx1024/int8", 30.0, 10.0));
    rows.push(row(1, "context/8-2-ctx4096/int8", 60.0, 40.0));
    let curves = latency(&devices, &rows);
    let labels: Vec<_> = curves.iter().map(|c| c.label.as_str()).collect();
    assert_eq!(labels, ["8/2 int8, 1 thread", "8/2 int8, 2 threads"]);
    assert_eq!((curves[0].points.len(), curves[1].points.len()), (3, 2));
}

/// The corners of every mark: the polygons of the SVG.
fn polygons(svg: &str) -> Vec<Vec<(f64, f64)>> {
    let corners = |element: &str| {
        let start = element.find("points=\"").expect("a polygon has points");
        let list = element[start..].split('"').nth(1).expect("a value");
        let corner = |pair: &str| {
            let (x, y) = pair.split_once(',').expect("x,y");
            (x.parse().expect("a number"), y.parse().expect("a number"))
        };
        list.split_whitespace().map(corner).collect()
    };
    svg.split("<polygon").skip(1).map(corners).collect()
}

/// Centres of the marks of points, in the order of the file; those of the legends stand beside the charts.
fn marks(svg: &str) -> Vec<(f64, f64)> {
    let centre = |corners: Vec<(f64, f64)>| {
        let n = corners.len() as f64;
        let sum = corners
            .iter()
            .fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        (sum.0 / n, sum.1 / n)
    };
    let in_chart = |mark: &(f64, f64)| mark.0 % 750.0 < 750.0 - f64::from(LEGEND);
    polygons(svg)
        .into_iter()
        .map(centre)
        .filter(in_chart)
        .collect()
}

#[test]
fn formats_and_devices_are_told_apart_without_colour() {
    let marks: Vec<_> = (0..COLOURS.len()).map(Mark::of).collect();
    for (i, mark) in marks.iter().enumerate() {
        assert!(mark.count >= 3);
        assert!(marks[..i].iter().all(|other| other != mark), "{i}");
    }
    let devices = ["cpu: avx2, 1 thread", "cpu: avx2, 2 threads"].map(str::to_owned);
    let one = svg(&devices, &rows()).unwrap();
    let mut both = rows();
    both.push(row(1, "context/8-2-ctx1024/int8", 30.0, 10.0));
    both.push(row(1, "context/8-2-ctx4096/int8", 60.0, 40.0));
    // A dashed line is many short ones.
    let strokes = |svg: &str| svg.matches("<polyline").count() + svg.matches("<line").count();
    let two = svg(&devices, &both).unwrap();
    assert!(strokes(&two) > strokes(&one) + 20);
    assert_eq!(polygons(&two).len(), polygons(&one).len() + 2 * 2 + 1);
}

/// A colour as eyes without the long, the middle or the short cones see it, in CIE Lab under daylight: the matrices of Machado, Oliveira and Fernandes (2009)
/// over linear sRGB, or `None` for all cones.
fn seen(colour: RGBColor, lacking: Option<[[f64; 3]; 3]>) -> [f64; 3] {
    let linear = [colour.0, colour.1, colour.2].map(|c| {
        let c = f64::from(c) / 255.0;
        match c <= 0.04045 {
            true => c / 12.92,
            false => ((c + 0.055) / 1.055).powf(2.4),
        }
    });
    let times = |m: [[f64; 3]; 3], x: [f64; 3]| {
        m.map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>())
    };
    let rgb = lacking.map_or(linear, |m| times(m, linear).map(|x| x.clamp(0.0, 1.0)));
    let xyz = times(
        [
            [0.412_456, 0.357_576, 0.180_437],
            [0.212_673, 0.715_152, 0.072_175],
            [0.019_334, 0.119_192, 0.950_304],
        ],
        rgb,
    );
    let white = [0.950_47, 1.0, 1.088_83];
    let [x, y, z] = std::array::from_fn(|i| match xyz[i] / white[i] {
        t if t > 0.008_856 => t.cbrt(),
        t => (903.3 * t + 16.0) / 116.0,
    });
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

/// A difference of 2.3 is just noticed by people with all cones.
#[test]
fn colours_are_told_apart_by_eyes_that_lack_a_kind_of_cones() {
    let protan = [
        [0.152_286, 1.052_583, -0.204_868],
        [0.114_503, 0.786_281, 0.099_216],
        [-0.003_882, -0.048_116, 1.051_998],
    ];
    let deutan = [
        [0.367_322, 0.860_646, -0.227_968],
        [0.280_085, 0.672_501, 0.047_413],
        [-0.011_820, 0.042_940, 0.968_881],
    ];
    let tritan = [
        [1.255_528, -0.076_749, -0.178_779],
        [-0.078_411, 0.930_809, 0.147_602],
        [0.004_733, 0.691_367, 0.303_900],
    ];
    for lacking in [None, Some(protan), Some(deutan), Some(tritan)] {
        let all = COLOURS.map(|colour| seen(colour, lacking));
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all[..i].iter().enumerate() {
                let apart = a
                    .iter()
                    .zip(b)
                    .map(|(a, b)| (a - b).powi(2))
                    .sum::<f64>()
                    .sqrt();
                // A chart of few formats has the first ones alone.
                let least = if i < 6 { 15.0 } else { 10.0 };
                assert!(
                    apart > least,
                    "colours {j} and {i} differ by {apart:.1}: {lacking:?}"
                );
            }
        }
    }
}

#[test]
fn marks_stand_where_their_figures_belong() {
    let svg = svg(&devices(), &rows()).unwrap();
    let marks = marks(&svg);
    let (left, right) = marks.split_at(3);
    assert_eq!(right.len(), 3);
    for (chart, side) in [(left, 0.0..750.0), (right, 750.0..1500.0)] {
        assert!(chart.iter().all(|mark| side.contains(&mark.0)), "{chart:?}");
        // More tokens stand to the right; more µs, or a greater share, higher up, where y is less.
        for pair in chart.windows(2) {
            assert!(pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1, "{chart:?}");
        }
    }
    // The axes of tokens are logarithmic: both steps are fourfold. So are those of µs.
    let step = |i: usize| left[i + 1].0 - left[i].0;
    assert!((step(0) - step(1)).abs() <= 2.0, "{left:?}");
    let rise = |i: usize| left[i].1 - left[i + 1].1;
    let expected = (200f64 / 80.0).ln() / (80f64 / 50.0).ln();
    assert!((rise(1) / rise(0) - expected).abs() < 0.05, "{left:?}");
    // Shares are linear: 20, 50, 75 %.
    let rise = |i: usize| right[i].1 - right[i + 1].1;
    assert!((rise(0) / rise(1) - 30.0 / 25.0).abs() < 0.05, "{right:?}");
    for text in [
        "tokens cached",
        "µs",
        "MiB of cache",
        "%",
        "8/2 int8",
        "4Ki",
    ] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn shares_above_100_percent_stay_inside_the_chart() {
    let mut rows = rows();
    rows[1] = row(0, "context/8-2-ctx16384/int8", 100.0, 300.0);
    let svg = svg(&devices(), &rows).unwrap();
    assert!(marks(&svg).iter().all(|mark| mark.1 > 20.0), "{svg}");
}

#[test]
fn numbers_on_axes_are_short() {
    let all = [0.25, 3.0, 512.0, 1000.0, 2048.0, 3_145_728.0].map(short);
    assert_eq!(all, ["0.25", "3", "512", "1000", "2Ki", "3Mi"]);
}

#[test]
fn only_decode_steps_from_pages_of_equal_sequences_of_128_dims_are_drawn() {
    let with = |change: fn(&mut Workload)| {
        let mut row = row(0, "context/8-2-ctx4096/int8", 80.0, 40.0);
        row.workload.problem.kv_lens = vec![5, 5, 5];
        change(&mut row.workload);
        plain(&row)
    };
    assert!(with(|_| ()));
    assert!(!with(|w| w.problem.kv_lens = vec![5, 5, 6]));
    assert!(!with(|w| w.problem.kv_lens = vec![6, 5, 5]));
    assert!(!with(|w| w.problem.head_dim = 64.into()));
    assert!(!with(|w| w.problem.head_dim = (192, 128).into()));
    assert!(!with(|w| w.planned = 131_072));
    assert!(!with(|w| w.cache = CacheLayout::Bnsh));
    assert!(!with(|w| w.operation = Operation::Append));
}

/// Two points of each of several formats, of one family or of two.
fn of_formats(families: &[&str]) -> Vec<Row> {
    let mut rows = Vec::new();
    for family in families {
        for format in ["bf16", "fp8", "int8", "int4", "int4-g4", "int8-g32"] {
            for tokens in [1024, 4096] {
                let mut row = row(0, "context/8-2-ctx4096/int8", tokens as f64, 100.0);
                row.workload.format = format.parse().unwrap();
                row.workload.problem.kv_lens = vec![tokens];
                row.workload.family = if *family == "single" {
                    "single"
                } else {
                    "context"
                };
                rows.push(row);
            }
        }
    }
    rows
}

#[test]
fn the_legend_of_shares_names_each_format_once() {
    let labels = share(&devices(), &of_formats(&["context", "single"]));
    let labels: Vec<_> = labels.iter().map(|c| c.label.as_str()).collect();
    let formats = ["bf16", "fp8", "int8", "int4", "int4-g4", "int8-g32"];
    assert_eq!(labels[..6], formats);
    assert_eq!(labels[6..], [""; 6]);
}

#[test]
fn every_format_has_a_colour_a_mark_a_line_and_a_place_in_the_legend() {
    let svg = svg(&devices(), &of_formats(&["context", "single"])).unwrap();
    for colour in &COLOURS[..6] {
        let text = format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2);
        assert!(svg.contains(&text), "{text}");
    }
    let white = svg.split("<polygon").skip(1).filter(|p| {
        let end = p.find("/>").unwrap_or(p.len());
        p[..end].contains("fill=\"#FFFFFF\"")
    });
    // Open marks are the second five: one format here. Both families have points of it, on the left together.
    let (white, all) = (white.count(), polygons(&svg).len());
    assert!(white > 0 && white < all / 2, "{white} of {all}");
    // Points of both charts, and a mark beside each label.
    let points = 2 * of_formats(&["context", "single"]).len();
    assert_eq!(all, points + 6 + 6);
    // Lines of two points on the right, of four on the left.
    let lines = |points: usize| {
        let lists = svg.split("<polyline").skip(1);
        let list = |p: &&str| {
            p[p.find("points=").expect("points")..]
                .split('"')
                .nth(1)
                .map(|list| list.split_whitespace().count())
        };
        lists.filter(|p| list(p) == Some(points)).count()
    };
    assert!(lines(2) >= 12, "{}", lines(2));
}

#[test]
fn a_chart_without_curves_is_left_out() {
    let (one_step, plain_read) = ("One decode step", "Share of a plain read");
    let charts = |rows: &[Row]| {
        let svg = svg(&devices(), rows).unwrap();
        [svg.contains(one_step), svg.contains(plain_read)]
    };
    assert_eq!(charts(&rows()), [true, true]);
    // One point is no curve of latency.
    assert_eq!(charts(&rows()[..1]), [false, true]);
    // Shapes of one's own have no share.
    let mut own = rows();
    own.iter_mut()
        .for_each(|row| row.workload.family = "custom");
    assert_eq!(charts(&own), [true, false]);
}

#[test]
fn axes_end_a_little_beyond_the_outermost_points() {
    assert_eq!(bounds([0.5, 0.2].into_iter()), 0.2 * 0.85..0.5 * 1.2);
    assert_eq!(bounds([3.0, 400.0].into_iter()), 3.0 * 0.85..400.0 * 1.2);
}

#[test]
fn numbers_on_axes_round_only_where_no_power_of_two_is_near() {
    let all = [
        0.0,
        1.0,
        1.25,
        1024.0,
        1500.0,
        3072.0,
        1_048_576.0,
        2_100_224.0,
    ]
    .map(short);
    assert_eq!(all, ["0", "1", "1", "1Ki", "1500", "3Ki", "1Mi", "2051Ki"]);
}
