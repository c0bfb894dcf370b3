//! From tokens to a tree. Functions are looked up here, so that an unknown one is found before anything is
//! written.

use std::collections::BTreeMap;

use super::lex::{Piece, Token, pieces};
use super::value::Value;
use super::{Error, functions};

/// How deep blocks and parentheses may nest.
const DEPTH: usize = 200;

pub(super) type List = Vec<(Node, usize)>;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Text(String),
    Action(Pipe),
    If(Pipe, List, List),
    With(Pipe, List, List),
    Range(Pipe, List, List),
    Template(String, Option<Pipe>),
    Break,
    Continue,
}

/// `$a, $b := first | second`
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Pipe {
    pub(super) variables: Vec<String>,
    pub(super) assigns: bool,
    pub(super) commands: Vec<Vec<Operand>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Operand {
    Function(String),
    Path(Vec<String>),
    Variable(String, Vec<String>),
    Literal(Value),
    Pipe(Pipe, Vec<String>),
}

/// A parsed template: the main list, and what `define` and `block` named.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    pub(super) main: List,
    pub(super) named: BTreeMap<String, List>,
}

/// Parses `text`.
pub(super) fn parse(text: &str) -> Result<Tree, Error> {
    let mut parser = Parser {
        pieces: pieces(text)?.into_iter(),
        named: BTreeMap::new(),
        variables: vec!["$".to_owned()],
        loops: 0,
        depth: 0,
        line: 1,
    };
    let (main, end) = parser.list()?;
    match end {
        End::Eof => Ok(Tree { main, named: parser.named }),
        End::Close => Err(parser.fail("unexpected {{end}}")),
        End::Else(_) => Err(parser.fail("unexpected {{else}}")),
    }
}

enum End {
    Eof,
    Close,
    // What follows the word: `if`, `with`, or nothing.
    Else(Vec<Token>),
}

struct Parser {
    pieces: std::vec::IntoIter<Piece>,
    named: BTreeMap<String, List>,
    variables: Vec<String>,
    loops: usize,
    depth: usize,
    line: usize,
}

impl Parser {
    fn fail(&self, reason: impl AsRef<str>) -> Error {
        Error::new(self.line, reason.as_ref())
    }

    fn list(&mut self) -> Result<(List, End), Error> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(self.fail("nested too deep"));
        }
        let scope = self.variables.len();
        let mut list = List::new();
        let end = loop {
            let Some(piece) = self.pieces.next() else { break End::Eof };
            let (tokens, line) = match piece {
                Piece::Text(text) => {
                    list.push((Node::Text(text), self.line));
                    continue;
                }
                Piece::Action(tokens, line) => (tokens, line),
            };
            self.line = line;
            let Some(Token::Word(word)) = tokens.first() else {
                list.push((Node::Action(self.pipe(&tokens)?), line));
                continue;
            };
            match (word.as_str(), &tokens[1..]) {
                ("end", []) => break End::Close,
                ("else", rest) => break End::Else(rest.to_vec()),
                ("if", rest) => list.push((self.branch(Node::If, rest)?, line)),
                ("with", rest) => list.push((self.branch(Node::With, rest)?, line)),
                ("range", rest) => {
                    self.loops += 1;
                    let node = self.branch(Node::Range, rest);
                    self.loops -= 1;
                    list.push((node?, line));
                }
                ("break", []) if self.loops > 0 => list.push((Node::Break, line)),
                ("continue", []) if self.loops > 0 => list.push((Node::Continue, line)),
                ("break" | "continue", _) => return Err(self.fail(format!("{word} outside range"))),
                ("template", [Token::Literal(Value::Text(name)), rest @ ..]) => {
                    let pipe = if rest.is_empty() { None } else { Some(self.pipe(rest)?) };
                    list.push((Node::Template(name.clone(), pipe), line));
                }
                ("define", [Token::Literal(Value::Text(name))]) => {
                    self.define(name.clone())?;
                }
                ("block", [Token::Literal(Value::Text(name)), rest @ ..]) => {
                    let pipe = self.pipe(rest)?;
                    self.define(name.clone())?;
                    list.push((Node::Template(name.clone(), Some(pipe)), line));
                }
                ("template" | "define" | "block" | "end", _) => {
                    return Err(self.fail(format!("bad syntax in {word}")));
                }
                _ => list.push((Node::Action(self.pipe(&tokens)?), line)),
            }
        };
        self.variables.truncate(scope);
        self.depth -= 1;
        Ok((list, end))
    }

    fn define(&mut self, name: String) -> Result<(), Error> {
        let outer = std::mem::replace(&mut self.variables, vec!["$".to_owned()]);
        let loops = std::mem::take(&mut self.loops);
        let (list, end) = self.list()?;
        (self.variables, self.loops) = (outer, loops);
        let End::Close = end else { return Err(self.fail(format!("{name:?} is not closed by {{{{end}}}}"))) };
        self.named.insert(name, list);
        Ok(())
    }

    fn branch(&mut self, make: fn(Pipe, List, List) -> Node, tokens: &[Token]) -> Result<Node, Error> {
        let scope = self.variables.len();
        let pipe = self.pipe(tokens)?;
        let line = self.line;
        let (list, end) = self.list()?;
        let otherwise = match end {
            End::Close => List::new(),
            End::Eof => return Err(Error::new(line, "unexpected EOF: a block is not closed by {{end}}")),
            End::Else(rest) => match rest.split_first() {
                None => {
                    let (list, End::Close) = self.list()? else {
                        return Err(self.fail("expected {{end}} behind {{else}}"));
                    };
                    list
                }
                // `else if` shares the end of the whole.
                Some((Token::Word(word), rest)) if word == "if" => {
                    vec![(self.branch(Node::If, rest)?, self.line)]
                }
                Some((Token::Word(word), rest)) if word == "with" => {
                    vec![(self.branch(Node::With, rest)?, self.line)]
                }
                Some(_) => return Err(self.fail("bad syntax in else")),
            },
        };
        self.variables.truncate(scope);
        Ok(make(pipe, list, otherwise))
    }

    fn pipe(&mut self, tokens: &[Token]) -> Result<Pipe, Error> {
        let mut pipe = Pipe::default();
        let mut rest = tokens;
        match tokens {
            [Token::Variable(a), Token::Declare, after @ ..] => {
                (pipe.variables, rest) = (vec![a.clone()], after);
            }
            [Token::Variable(a), Token::Assign, after @ ..] => {
                (pipe.variables, pipe.assigns, rest) = (vec![a.clone()], true, after);
            }
            [Token::Variable(a), Token::Comma, Token::Variable(b), Token::Declare, after @ ..] => {
                (pipe.variables, rest) = (vec![a.clone(), b.clone()], after);
            }
            [Token::Variable(a), Token::Comma, Token::Variable(b), Token::Assign, after @ ..] => {
                (pipe.variables, pipe.assigns, rest) = (vec![a.clone(), b.clone()], true, after);
            }
            _ => {}
        }
        if pipe.assigns {
            self.known(&pipe.variables[0])?;
        }
        let commands = self.commands(rest)?;
        self.variables.extend(pipe.variables.iter().filter(|_| !pipe.assigns).cloned());
        Ok(Pipe { commands, ..pipe })
    }

    fn known(&self, variable: &str) -> Result<(), Error> {
        if self.variables.iter().any(|v| v == variable) {
            return Ok(());
        }
        Err(self.fail(format!("undefined variable {variable:?}")))
    }

    fn commands(&mut self, tokens: &[Token]) -> Result<Vec<Vec<Operand>>, Error> {
        let mut commands = vec![Vec::new()];
        let mut rest = tokens;
        while let Some((token, after)) = rest.split_first() {
            rest = after;
            let operand = match token {
                Token::Pipe => {
                    if commands.last().is_some_and(Vec::is_empty) {
                        return Err(self.fail("missing value for command"));
                    }
                    commands.push(Vec::new());
                    continue;
                }
                Token::Word(name) if functions::is_known(name) => Operand::Function(name.clone()),
                Token::Word(name) => return Err(self.fail(format!("function {name:?} not defined"))),
                Token::Path(names, _) => Operand::Path(names.clone()),
                Token::Literal(value) => Operand::Literal(value.clone()),
                Token::Variable(name) => {
                    self.known(name)?;
                    let names = glued(&mut rest);
                    Operand::Variable(name.clone(), names)
                }
                Token::Open => {
                    let (inner, after) = self.parenthesis(rest)?;
                    rest = after;
                    self.depth += 1;
                    if self.depth > DEPTH {
                        return Err(self.fail("nested too deep"));
                    }
                    let pipe = self.pipe(inner)?;
                    self.depth -= 1;
                    Operand::Pipe(pipe, glued(&mut rest))
                }
                other => return Err(self.fail(format!("unexpected {other:?} in operand"))),
            };
            if let Some(command) = commands.last_mut() {
                command.push(operand);
            }
        }
        if commands.last().is_some_and(Vec::is_empty) {
            return Err(self.fail("missing value for command"));
        }
        Ok(commands)
    }

    fn parenthesis<'a>(&self, tokens: &'a [Token]) -> Result<(&'a [Token], &'a [Token]), Error> {
        let mut depth = 1;
        for (at, token) in tokens.iter().enumerate() {
            match token {
                Token::Open => depth += 1,
                Token::Close => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok((&tokens[..at], &tokens[at + 1..]));
            }
        }
        Err(self.fail("unclosed left paren"))
    }
}

// Members named directly behind a variable or a parenthesis.
fn glued(rest: &mut &[Token]) -> Vec<String> {
    if let Some((Token::Path(names, true), after)) = rest.split_first() {
        *rest = after;
        return names.clone();
    }
    Vec::new()
}
