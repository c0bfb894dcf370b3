//! Renders an operator's own bootstrap template: Go's `text/template` syntax.
//!
//! What is there: all actions (`if`, `range`, `with`, `define`, `template`, `block`, `break`, `continue`,
//! comments, variables, trim markers, pipelines), all of Go's own functions but `call`, `toJSON`, and the
//! functions of Sprig that work on text, numbers, lists and dictionaries. A function that is not there is a
//! parse error that names it; nothing is rendered then. Not there: methods other than getters, printing a
//! whole record but for spans of time and single numbers, complex numbers.
//!
//! Our own because the crates for this syntax (gtmpl and its forks) have not been kept for years, know
//! neither trim markers inside blocks reliably nor `else with`, `break` or Sprig, and print numbers and
//! absent values other than Go does; other template engines have another syntax.

mod eval;
mod functions;
mod lex;
mod message;
mod parse;
#[cfg(test)]
mod tests;
mod text;
mod value;

use std::collections::BTreeMap;

pub(crate) use value::{Record, Value, capital, go_json};

/// Why a template gave nothing.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct Error {
    /// Where, from 1.
    pub line: usize,
    /// What.
    pub reason: String,
}

/// What a token, a value or a function's arguments are refused for; [`Error`] adds the line and the function's name.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    /// A value of the wrong type.
    #[error("{what} type {kind}")]
    Type {
        /// What was to be done with it.
        what: &'static str,
        /// Its type.
        kind: &'static str,
    },
    /// A value that should be text.
    #[error("wanted a string, got {0}")]
    NoText(&'static str),
    /// There is no such place.
    #[error("index out of range: {0}")]
    Range(i64),
    /// A slice that ends before it begins.
    #[error("invalid slice index: {from} > {to}")]
    Slice {
        /// Its begin.
        from: usize,
        /// Its end.
        to: usize,
    },
    /// A type without this member.
    #[error("can't evaluate field {name} in type {kind}")]
    Field {
        /// The member.
        name: String,
        /// The type.
        kind: &'static str,
    },
    /// A member of a message that is not set.
    #[error("nil pointer evaluating {kind}.{name}")]
    NilPointer {
        /// The member.
        name: String,
        /// The message's type.
        kind: &'static str,
    },
    /// A value that has no text.
    #[error("cannot print a whole {0}: name a member, or use toJSON")]
    Unprintable(&'static str),
    /// A function with so many arguments.
    #[error("wrong arguments: {0} given")]
    Arguments(usize),
    /// A count below zero.
    #[error("{0} is negative")]
    Negative(i64),
    /// A literal that cannot be read.
    #[error("bad string {0}")]
    Quoted(String),
    /// A number that cannot be read.
    #[error("bad number syntax: {0:?}")]
    Number(String),
    /// A character that begins nothing.
    #[error("unexpected {0:?} in command")]
    Unexpected(char),
    /// What has no details.
    #[error("{0}")]
    Plain(&'static str),
    /// What the template itself says (`fail`, `required`).
    #[error("{0}")]
    Said(String),
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
