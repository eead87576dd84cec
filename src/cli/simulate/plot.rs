//! The curves as SVG: allocated over requested, one line per policy.

use std::fmt::Write as _;

use super::report::SimulationReport;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
/// Left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (60.0, 30.0, 150.0, 50.0);
const COLOURS: [&str; 4] = ["#1b6ca8", "#999999", "#c0392b", "#2e8b57"];
/// Below this nothing differs: everything that is requested is allocated.
const FROM: f64 = 60.0;

struct Axes {
    load: f64,
}

impl Axes {
    fn x(&self, requested: f64) -> f64 {
        MARGIN.0 + (requested - FROM) / (self.load - FROM) * (WIDTH - MARGIN.0 - MARGIN.2)
    }
    fn y(&self, allocated: f64) -> f64 {
        HEIGHT - MARGIN.3 - (allocated - FROM) / (100.0 - FROM) * (HEIGHT - MARGIN.1 - MARGIN.3)
    }
}

pub fn svg(report: &SimulationReport) -> String {
    let axes = Axes { load: (report.load * 100.0).max(FROM + 10.0) };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    frame(&mut out, &axes, &report.pods);
    for (nth, series) in report.all.iter().enumerate() {
        let colour = COLOURS[nth % COLOURS.len()];
        let mut points = String::new();
        for percent in FROM as usize..=axes.load as usize {
            if let Some(spread) = series.at(percent).filter(|spread| spread.mean >= FROM) {
                let _ = write!(points, "{:.1},{:.1} ", axes.x(percent as f64), axes.y(spread.mean));
            }
        }
        let end = series.end().mean;
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{} {end:.2} %</text>",
            points.trim_end(),
            WIDTH - MARGIN.2 + 8.0,
            MARGIN.1 + 20.0 * (nth as f64 + 1.0),
            series.scheduler
        );
    }
    out.push_str("</svg>\n");
    out
}

fn frame(out: &mut String, axes: &Axes, title: &str) {
    let (left, right) = (axes.x(FROM), axes.x(axes.load));
    for allocated in [60, 70, 80, 90, 100] {
        let y = axes.y(f64::from(allocated));
        let _ = writeln!(
            out,
            "<line x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{allocated}</text>",
            left - 6.0,
            y + 4.0
        );
    }
    let mut requested = FROM;
    while requested <= axes.load {
        let x = axes.x(requested);
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{requested:.0}</text>",
            HEIGHT - MARGIN.3 + 18.0
        );
        requested += 10.0;
    }
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        out,
        "<text x=\"{left:.1}\" y=\"18\">{title}: GPUs allocated (%) over GPUs requested (%)</text>\n\
         <line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#bbbbbb\" stroke-dasharray=\"4\"/>",
        left,
        axes.y(FROM),
        axes.x(axes.load.min(100.0)),
        axes.y(axes.load.min(100.0))
    );
}
