//! Walks the tree and writes.

use std::collections::BTreeMap;

use super::Error;
use super::functions;
use super::parse::{List, Node, Operand, Pipe, Tree};
use super::value::{LIMIT, Value};

/// How deep templates may call each other.
const DEPTH: usize = 100;
/// The most that `range` counts to.
const LOOP: usize = 100_000;
/// How often a node may be visited in all: a template that loops over itself ends.
const STEPS: usize = 1_000_000;

pub(super) fn run(tree: &Tree, data: &Value, env: &BTreeMap<String, String>) -> Result<String, Error> {
    let mut state = Run {
        tree,
        env,
        out: String::new(),
        variables: vec![("$".to_owned(), data.clone())],
        depth: 0,
        steps: 0,
        line: 1,
    };
    state.list(&tree.main, data)?;
    Ok(state.out)
}

enum Flow {
    On,
    Break,
    Continue,
}

struct Run<'a> {
    tree: &'a Tree,
    env: &'a BTreeMap<String, String>,
    out: String,
    variables: Vec<(String, Value)>,
    depth: usize,
    steps: usize,
    line: usize,
}

impl Run<'_> {
    fn fail(&self, reason: impl AsRef<str>) -> Error {
        Error::new(self.line, reason.as_ref())
    }

    fn list(&mut self, list: &List, dot: &Value) -> Result<Flow, Error> {
        let scope = self.variables.len();
        for (node, line) in list {
            self.line = *line;
            self.steps += 1;
            if self.steps > STEPS || self.out.len() > LIMIT {
                return Err(self.fail("the template does not come to an end"));
            }
            match self.node(node, dot)? {
                Flow::On => {}
                flow => {
                    self.variables.truncate(scope);
                    return Ok(flow);
                }
            }
        }
        self.variables.truncate(scope);
        Ok(Flow::On)
    }

    fn node(&mut self, node: &Node, dot: &Value) -> Result<Flow, Error> {
        match node {
            Node::Text(text) => self.out.push_str(text),
            Node::Action(pipe) => {
                let value = self.pipe(pipe, dot)?;
                if pipe.variables.is_empty() {
                    let text = match value {
                        Value::Nil => "<no value>".to_owned(),
                        value => value.print().map_err(|e| self.fail(e.to_string()))?,
                    };
                    self.out.push_str(&text);
                }
            }
            Node::If(pipe, list, otherwise) => {
                let scope = self.variables.len();
                let truth = self.pipe(pipe, dot)?.truth();
                let flow = self.list(if truth { list } else { otherwise }, dot)?;
                self.variables.truncate(scope);
                return Ok(flow);
            }
            Node::With(pipe, list, otherwise) => {
                let scope = self.variables.len();
                let value = self.pipe(pipe, dot)?;
                let flow = if value.truth() { self.list(list, &value)? } else { self.list(otherwise, dot)? };
                self.variables.truncate(scope);
                return Ok(flow);
            }
            Node::Range(pipe, list, otherwise) => {
                let scope = self.variables.len();
                let flow = self.range(pipe, list, otherwise, dot);
                self.variables.truncate(scope);
                return flow;
            }
            Node::Template(name, pipe) => {
                let value = match pipe {
                    Some(pipe) => self.pipe(pipe, dot)?,
                    None => Value::Nil,
                };
                let tree = self.tree;
                let list = tree
                    .named
                    .get(name)
                    .ok_or_else(|| self.fail(format!("template {name:?} not defined")))?;
                self.depth += 1;
                if self.depth > DEPTH {
                    return Err(self.fail("templates call each other without an end"));
                }
                let outer = std::mem::replace(&mut self.variables, vec![("$".to_owned(), value.clone())]);
                self.list(list, &value)?;
                self.variables = outer;
                self.depth -= 1;
            }
            Node::Break => return Ok(Flow::Break),
            Node::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::On)
    }

    fn range(&mut self, pipe: &Pipe, list: &List, otherwise: &List, dot: &Value) -> Result<Flow, Error> {
        let bare = Pipe { variables: Vec::new(), ..pipe.clone() };
        let value = self.pipe(&bare, dot)?;
        // What is assigned to holds the whole until there is an item.
        for name in pipe.variables.iter().filter(|_| pipe.assigns) {
            self.bind(name, value.clone(), true);
        }
        if let (Value::Int(n), [_, _]) = (&value, pipe.variables.as_slice()) {
            return Err(self.fail(format!("can't use {n} to iterate over more than one variable")));
        }
        let items: Vec<(Value, Value)> = match value {
            Value::Nil => Vec::new(),
            Value::List(items) => items
                .into_iter()
                .enumerate()
                .map(|(i, v)| (Value::Int(i64::try_from(i).unwrap_or(0)), v))
                .collect(),
            Value::Map(members) => members.into_iter().map(|(k, v)| (Value::Text(k), v)).collect(),
            Value::Int(n) if usize::try_from(n).is_ok_and(|n| n > LOOP) => {
                return Err(self.fail("range over a number beyond reason"));
            }
            Value::Int(n) => (0..n).map(|i| (Value::Int(i), Value::Int(i))).collect(),
            other => return Err(self.fail(format!("range can't iterate over {}", other.kind()))),
        };
        if items.is_empty() {
            return self.list(otherwise, dot);
        }
        let scope = self.variables.len();
        for (key, item) in items {
            match pipe.variables.as_slice() {
                [] => {}
                [one] => self.bind(one, item.clone(), pipe.assigns),
                [first, second, ..] => {
                    self.bind(first, key, pipe.assigns);
                    self.bind(second, item.clone(), pipe.assigns);
                }
            }
            let flow = self.list(list, &item)?;
            self.variables.truncate(scope);
            if matches!(flow, Flow::Break) {
                break;
            }
        }
        Ok(Flow::On)
    }

    fn bind(&mut self, name: &str, value: Value, assigns: bool) {
        if assigns && let Some(slot) = self.variables.iter_mut().rev().find(|(n, _)| n == name) {
            slot.1 = value;
            return;
        }
        self.variables.push((name.to_owned(), value));
    }

    fn pipe(&mut self, pipe: &Pipe, dot: &Value) -> Result<Value, Error> {
        let mut last: Option<Value> = None;
        for command in &pipe.commands {
            last = Some(self.command(command, dot, last)?);
        }
        let value = last.unwrap_or(Value::Nil);
        if let Some(name) = pipe.variables.first() {
            self.bind(name, value.clone(), pipe.assigns);
        }
        Ok(value)
    }

    fn command(&mut self, command: &[Operand], dot: &Value, last: Option<Value>) -> Result<Value, Error> {
        let Some((first, rest)) = command.split_first() else { return Ok(Value::Nil) };
        let Operand::Function(name) = first else {
            if !rest.is_empty() || last.is_some() {
                return Err(self.fail("can't give argument to non-function"));
            }
            if matches!(first, Operand::Literal(Value::Nil)) {
                return Err(self.fail("nil is not a command"));
            }
            return self.operand(first, dot);
        };
        if let "and" | "or" = name.as_str() {
            return self.short_circuit(name == "and", rest, dot, last);
        }
        let mut arguments = Vec::with_capacity(rest.len() + 1);
        for operand in rest {
            arguments.push(self.operand(operand, dot)?);
        }
        arguments.extend(last);
        functions::call(name, arguments, self.env)
            .map_err(|e| self.fail(format!("error calling {name}: {e}")))
    }

    // The rest is not even evaluated once the result is known.
    fn short_circuit(
        &mut self,
        and: bool,
        operands: &[Operand],
        dot: &Value,
        last: Option<Value>,
    ) -> Result<Value, Error> {
        let mut value = None;
        for operand in operands {
            let next = self.operand(operand, dot)?;
            if next.truth() != and {
                return Ok(next);
            }
            value = Some(next);
        }
        last.or(value).ok_or_else(|| self.fail("wrong number of args for and/or: want at least 1 got 0"))
    }

    fn operand(&mut self, operand: &Operand, dot: &Value) -> Result<Value, Error> {
        let value = match operand {
            Operand::Function(name) => {
                let value = functions::call(name, Vec::new(), self.env);
                return value.map_err(|e| self.fail(format!("error calling {name}: {e}")));
            }
            Operand::Literal(value) => return Ok(value.clone()),
            Operand::Path(names) => dot.walk(names),
            Operand::Variable(name, names) => {
                let found = self.variables.iter().rev().find(|(n, _)| n == name);
                found.map_or(&Value::Nil, |(_, value)| value).walk(names)
            }
            Operand::Pipe(pipe, names) => self.pipe(pipe, dot)?.walk(names),
        };
        value.map_err(|e| self.fail(e.to_string()))
    }
}
