//! The text of metrics in the two formats that scrapers read, and which of them one asked for. Pure.
//!
//! The encoder writes OpenMetrics 1.0. Whoever does not ask for that gets Prometheus' text format 0.0.4, which has no
//! `info`, no `# EOF`, and names a counter's family as its series, with `_total`.

use std::fmt::Write;

/// A format, with the type that it is served as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    OpenMetrics,
    Text,
}

/// Parts of one Accept header that are looked at; scrapers send five.
const PARTS_MAX: usize = 32;

impl Format {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// What an Accept header asks for (RFC 9110, 12.5.1): OpenMetrics only if it is named, and not behind text/plain.
    pub fn asked_for(accept: Option<&str>) -> Self {
        let (mut open, mut plain) = (0.0, 0.0);
        for part in accept.unwrap_or_default().split(',').take(PARTS_MAX) {
            let mut fields = part.split(';').map(str::trim);
            let best = match fields.next().unwrap_or_default().to_ascii_lowercase().as_str() {
                "application/openmetrics-text" => &mut open,
                "text/plain" => &mut plain,
                _ => continue,
            };
            *best = quality(fields).max(*best);
        }
        if open > 0.0 && open >= plain { Self::OpenMetrics } else { Self::Text }
    }
}

fn quality<'a>(fields: impl Iterator<Item = &'a str>) -> f64 {
    let mut values = fields.filter_map(|field| field.strip_prefix("q=").or_else(|| field.strip_prefix("Q=")));
    values.next().map_or(1.0, |value| value.trim().parse().unwrap_or(0.0))
}

/// OpenMetrics text as Prometheus' text format 0.0.4: the same series with the same values.
pub(super) fn as_text(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    // HELP comes before TYPE, which says how the family is called.
    let mut help = None;
    for line in open.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = Some(described.split_once(' ').unwrap_or((described, "")));
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (family, kind) = typed.split_once(' ').unwrap_or((typed, "unknown"));
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "gauge" | "histogram" | "summary" => ("", kind),
                _ => ("", "untyped"),
            };
            // Writing to a String cannot fail.
            if let Some((_, words)) = help.take().filter(|(of, _)| *of == family) {
                let _ = writeln!(text, "# HELP {family}{suffix} {words}");
            }
            let _ = writeln!(text, "# TYPE {family}{suffix} {kind}");
        } else if !line.starts_with('#') {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_called_as_the_text_format_has_them() {
        let open = "\
# HELP tranche_build Which build this is.
# TYPE tranche_build info
tranche_build_info{version=\"0.1.0\"} 1
# HELP tranche_looks Looks.
# TYPE tranche_looks counter
tranche_looks_total 3
# HELP tranche_took_seconds How long.
# TYPE tranche_took_seconds histogram
# UNIT tranche_took_seconds seconds
tranche_took_seconds_sum 0.0
tranche_took_seconds_bucket{le=\"+Inf\"} 0
# TYPE tranche_odd unknown
tranche_odd{name=\"# no comment\"} 1
# EOF
";
        let expected = "\
# HELP tranche_build_info Which build this is.
# TYPE tranche_build_info gauge
tranche_build_info{version=\"0.1.0\"} 1
# HELP tranche_looks_total Looks.
# TYPE tranche_looks_total counter
tranche_looks_total 3
# HELP tranche_took_seconds How long.
# TYPE tranche_took_seconds histogram
tranche_took_seconds_sum 0.0
tranche_took_seconds_bucket{le=\"+Inf\"} 0
# TYPE tranche_odd untyped
tranche_odd{name=\"# no comment\"} 1
";
        assert_eq!(as_text(open), expected);
    }

    #[test]
    fn openmetrics_is_for_those_who_ask_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;\
                          version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, expected) in [
            (None, Format::Text),
            (Some(""), Format::Text),
            (Some("*/*"), Format::Text),
            (Some("text/html,*/*;q=0.8"), Format::Text),
            (Some("text/plain"), Format::Text),
            (Some("text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), Format::Text),
            (Some(prometheus), Format::OpenMetrics),
            (Some("Application/OpenMetrics-Text; version=1.0.0"), Format::OpenMetrics),
            (Some("application/openmetrics-text;q=0"), Format::Text),
            (Some("application/openmetrics-text;q=nonsense"), Format::Text),
            (Some("application/openmetrics-text;q=0.3, text/plain;q=0.7"), Format::Text),
        ] {
            assert_eq!(Format::asked_for(accept), expected, "{accept:?}");
        }
    }
}
