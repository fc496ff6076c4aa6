//! How a curve looks: a format has a colour and a mark, a device or a missing mask a stroke; and the legend that shows them.

use plotters::{coord::Shift, prelude::*};

use super::curves::Curve;

/// The colours of formats, in the order in which the formats come: those of Okabe and Ito that stand out from white, and others beside them, which eyes that
/// lack a kind of cones tell apart, too.
pub(super) const COLOURS: [RGBColor; 11] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(110, 20, 70),
    RGBColor(170, 160, 60),
    RGBColor(225, 45, 240),
];

/// An area of the SVG file.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Pixels of dashes and gaps in the lines of each stroke; the first is solid.
pub(super) const DASHES: [Option<(u32, u32)>; 4] =
    [None, Some((10, 5)), Some((3, 3)), Some((14, 3))];

/// The mark of a format's points, by which lines are told apart without colour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Mark {
    /// Corners on a circle of at most [`MARK_RADIUS`] pixels, `(x, y)`.
    corners: [Offset; 8],
    pub count: usize,
    filled: bool,
}

/// Pixels from a point.
type Offset = (i32, i32);

const MARK_RADIUS: f64 = 5.0;

/// Pixels of a stroke in the legend: wide enough for dashes on both sides of the mark.
const KEY_WIDTH: i32 = 40;

impl Mark {
    /// Triangles, squares, diamonds, pentagons and octagons, first filled, then open, then small: one for each colour.
    pub fn of(index: usize) -> Self {
        // Corners, and the turn of the first one in eighths of a circle.
        let (count, turn) = [(8, 0.5), (4, 1.0), (3, 2.0), (4, 0.0), (3, -2.0)][index % 5];
        let radius = if index < 10 {
            MARK_RADIUS
        } else {
            0.6 * MARK_RADIUS
        };
        let corner = |i: usize| {
            let angle = (turn / 8.0 + i as f64 / count as f64) * std::f64::consts::TAU;
            let [x, y] = [angle.cos(), -angle.sin()].map(|x| (x * radius).round() as i32);
            (x, y)
        };
        Mark {
            corners: std::array::from_fn(|i| corner(i % count)),
            count,
            filled: (index / 5).is_multiple_of(2),
        }
    }

    /// The area and the outline, around the point that they are added to.
    pub fn parts(self, colour: RGBAColor) -> (Polygon<Offset>, PathElement<Offset>) {
        let mut corners = self.corners[..self.count].to_vec();
        let inside = if self.filled { colour } else { WHITE.to_rgba() };
        let area = Polygon::new(corners.clone(), inside.filled());
        corners.push(corners[0]);
        (area, PathElement::new(corners, colour.stroke_width(1)))
    }
}

/// A line of the legend: the stroke, the mark and the label.
pub(super) fn draw_key(
    legend: &Area<'_>,
    curve: &Curve,
    style: ShapeStyle,
    mark: Mark,
    below: i32,
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let ends = [(0, below), (KEY_WIDTH, below)];
    match DASHES[curve.stroke % DASHES.len()] {
        None => legend.draw(&PathElement::new(ends, style))?,
        Some((dash, gap)) => {
            let step = (dash + gap) as usize;
            for x in (0..KEY_WIDTH).step_by(step) {
                let end = (x + dash as i32).min(KEY_WIDTH);
                legend.draw(&PathElement::new([(x, below), (end, below)], style))?;
            }
        }
    }
    let (area, outline) = mark.parts(style.color);
    legend.draw(&(EmptyElement::at((KEY_WIDTH / 2, below)) + area + outline))?;
    legend.draw(&Text::new(
        &*curve.label,
        (KEY_WIDTH + 6, below - 6),
        ("sans-serif", 13),
    ))
}
