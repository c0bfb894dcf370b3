//! Renders an operator's own bootstrap template: Go's `text/template` syntax.
//!
//! What is there: all actions (`if`, `range`, `with`, `define`, `template`, `block`, `break`, `continue`,
//! comments, variables, trim markers, pipelines), all of Go's own functions but `call`, `toJSON`, and the
//! functions of Sprig that work on text, numbers, lists and dictionaries. A function that is not there is a
//! parse error that names it; nothing is rendered then. Not there: methods other than getters, printing a
//! whole record, complex numbers.
//!
//! Our own because the crates for this syntax (gtmpl and its forks) have not been kept for years, know
//! neither trim markers inside blocks reliably nor `else with`, `break` or Sprig, and print numbers and
//! absent values other than Go does; other template engines have another syntax.

mod eval;
mod functions;
mod lex;
mod parse;
#[cfg(test)]
mod tests;
mod text;
mod value;

use std::collections::BTreeMap;

pub(crate) use value::{Record, Value, go_json};

/// Why a template gave nothing.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct Error {
    /// Where, from 1.
    pub line: usize,
    /// What.
    pub reason: String,
}

impl Error {
    fn new(line: usize, reason: &str) -> Self {
        Self { line, reason: reason.to_owned() }
    }
}

/// Renders `template` with `data` as the dot; `env` is what the function `env` sees.
///
/// # Errors
/// With the line where it cannot be parsed or evaluated; there is no partial result.
pub fn render(template: &str, data: &Value, env: &BTreeMap<String, String>) -> Result<String, Error> {
    let tree = parse::parse(template)?;
    eval::run(&tree, data, env)
}
