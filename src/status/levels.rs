//! `/logging`: levels of the log while the agent runs, as Envoy's admin port has it: GET lists, POST sets.

use http::{Method, StatusCode};

use crate::base::logging;
use crate::base::quote::cut;
use crate::base::seldom::Seldom;
use crate::serve::respond::{Answer, TEXT, error, page};

/// Nobody reads more about levels in a minute.
static CHANGED: Seldom = Seldom::new(30);

pub(super) fn answer(method: &Method, query: &str) -> Answer {
    let pairs: Vec<(&str, &str)> = query.split('&').filter(|p| !p.is_empty()).flat_map(pairs).collect();
    if pairs.is_empty() {
        return list();
    }
    if method != Method::POST {
        return error(StatusCode::METHOD_NOT_ALLOWED, "levels are set by POST");
    }
    let before = logging::levels();
    match logging::change(&pairs) {
        Ok(()) => {
            let after = logging::levels();
            if after != before
                && let Some(more) = CHANGED.may()
            {
                tracing::info!("log levels changed: {}{more}", cut(query, 200));
            }
            list()
        }
        Err(why) => error(StatusCode::BAD_REQUEST, &why.to_string()),
    }
}

// `level=debug` is all scopes, `paths=xdsproxy:debug,sds:info` several, `xdsproxy=debug` one.
fn pairs(parameter: &str) -> Vec<(&str, &str)> {
    match parameter.split_once('=') {
        Some(("level", level)) => vec![("all", level)],
        Some(("paths", list)) => list.split(',').map(|p| p.split_once(':').unwrap_or((p, ""))).collect(),
        Some(pair) => vec![pair],
        None => vec![(parameter, "")],
    }
}

fn list() -> Answer {
    let mut text = String::from("active loggers:\n");
    for (scope, level) in logging::levels() {
        text.push_str(&format!("  {scope}: {level}\n"));
    }
    page(StatusCode::OK, TEXT, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_all_or_several() {
        assert_eq!(pairs("level=debug"), [("all", "debug")]);
        assert_eq!(pairs("xdsproxy=debug"), [("xdsproxy", "debug")]);
        assert_eq!(pairs("paths=sds:info,ca:warn"), [("sds", "info"), ("ca", "warn")]);
        assert_eq!(pairs("nonsense"), [("nonsense", "")]);
        assert_eq!(answer(&Method::GET, "level=debug").status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(answer(&Method::POST, "level=loud").status(), StatusCode::BAD_REQUEST);
    }
}
