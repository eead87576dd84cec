//! Expressions as they are evaluated, and what they read of a device.

use std::collections::BTreeSet;

use super::facts::{AttributeValue, DeviceFacts, QualifiedName};
use super::function::Function;
use super::pattern::Pattern;
use crate::model::quantity::Quantity;

#[derive(Debug, Clone)]
pub enum Expr {
    Null,
    Bool(bool),
    Int(i64),
    Text(String),
    /// The variable `device`.
    Device,
    /// A variable that the expression itself brings, by its place among those in force.
    Local(usize),
    /// `of.name`
    Field(Box<Expr>, String),
    /// `has(of.name)`
    Has(Box<Expr>, String),
    /// `of[key]`
    Item(Box<Expr>, Box<Expr>),
    /// `of.?name`
    MaybeField(Box<Expr>, String),
    /// `of[?key]`
    MaybeItem(Box<Expr>, Box<Expr>),
    List(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    /// Condition, then, else.
    If(Box<[Expr; 3]>),
    Call(Function, Vec<Expr>),
    /// `of.matches(pattern)`
    Matches(Box<Expr>, Pattern),
    /// `cel.bind(name, value, body)`: value, body.
    Let(Box<[Expr; 2]>),
    /// `of.optMap(name, body)`, or `optFlatMap`: of, body; true: the body gives an optional itself.
    OptMap(Box<[Expr; 2]>, bool),
    Fold(Box<Fold>),
}

impl Expr {
    /// A literal, or an operator that only decides what is evaluated.
    pub(super) fn is_light(&self) -> bool {
        matches!(
            self,
            Self::Null
                | Self::Bool(_)
                | Self::Int(_)
                | Self::Text(_)
                | Self::And(..)
                | Self::Or(..)
                | Self::If(_)
        )
    }
}

/// What `all`, `exists`, `exists_one`, `map` and `filter` are made of. `condition` and `step` see the result so far
/// and, in the next place, the element; `result` sees the former.
#[derive(Debug, Clone)]
pub struct Fold {
    pub range: Expr,
    pub init: Expr,
    pub condition: Expr,
    pub step: Expr,
    pub result: Expr,
}

/// What an expression reads of a device: devices that agree in it get the same answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Reads {
    /// It looks at whatever there is.
    all: bool,
    attributes: BTreeSet<QualifiedName>,
    capacity: BTreeSet<QualifiedName>,
}

/// What was read, for comparing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValuesRead<'a> {
    All(&'a DeviceFacts),
    Names(&'a str, bool, Vec<Option<&'a AttributeValue>>, Vec<Option<Quantity>>),
}

impl Reads {
    pub(super) fn of(expr: &Expr) -> Self {
        let mut walk = Walk { reads: Self::default(), locals: Vec::new() };
        walk.look(expr);
        walk.reads
    }

    pub fn values_read<'a>(&self, device: &'a DeviceFacts) -> ValuesRead<'a> {
        if self.all {
            return ValuesRead::All(device);
        }
        let attributes = self.attributes.iter().map(|name| device.attributes.get(name)).collect();
        let capacity = self.capacity.iter().map(|name| device.capacity.get(name).copied()).collect();
        ValuesRead::Names(&device.driver, device.allow_multiple, attributes, capacity)
    }

    /// Both together.
    pub fn with(mut self, other: &Self) -> Self {
        self.all |= other.all;
        self.attributes.extend(other.attributes.iter().cloned());
        self.capacity.extend(other.capacity.iter().cloned());
        self
    }
}

/// Steps that lead from `device` to a part of it.
type Path = Vec<String>;

struct Walk {
    reads: Reads,
    /// What variables stand for, where it is a part of the device.
    locals: Vec<Option<Path>>,
}

impl Walk {
    fn look(&mut self, expr: &Expr) {
        if let Some(path) = self.path(expr) {
            return self.read(&path);
        }
        match expr {
            Expr::Null | Expr::Bool(_) | Expr::Int(_) | Expr::Text(_) | Expr::Local(_) | Expr::Device => {}
            Expr::Field(of, _) | Expr::Has(of, _) | Expr::MaybeField(of, _) | Expr::Matches(of, _) => {
                self.look(of);
            }
            Expr::Item(of, key) | Expr::MaybeItem(of, key) | Expr::And(of, key) | Expr::Or(of, key) => {
                self.look(of);
                self.look(key);
            }
            Expr::Call(Function::In, sides) => self.member(sides),
            Expr::List(all) | Expr::Call(_, all) => all.iter().for_each(|one| self.look(one)),
            Expr::Map(all) => all.iter().for_each(|(key, value)| {
                self.look(key);
                self.look(value);
            }),
            Expr::If(all) => all.iter().for_each(|one| self.look(one)),
            Expr::Let(both) => self.bind(&both[0], &both[1]),
            Expr::OptMap(both, _) => self.bind(&both[0], &both[1]),
            Expr::Fold(fold) => {
                self.look(&fold.range);
                self.look(&fold.init);
                self.locals.extend([None, None]);
                self.look(&fold.condition);
                self.look(&fold.step);
                self.locals.pop();
                self.look(&fold.result);
                self.locals.pop();
            }
        }
    }

    fn bind(&mut self, value: &Expr, body: &Expr) {
        let path = self.path(value);
        // A domain is always there; a name, or what is computed, is looked at even if the body does not use it.
        if path.as_ref().is_none_or(|path| path.len() != 2) {
            self.look(value);
        }
        self.locals.push(path);
        self.look(body);
        self.locals.pop();
    }

    /// `"name" in device.attributes[domain]` reads that name alone.
    fn member(&mut self, sides: &[Expr]) {
        if let [Expr::Text(name), of] = sides
            && let Some(mut path) = self.path(of)
            && path.len() == 2
        {
            path.push(name.clone());
            return self.read(&path);
        }
        sides.iter().for_each(|side| self.look(side));
    }

    fn read(&mut self, path: &Path) {
        let names = match path.first().map(String::as_str) {
            Some("driver" | "allowMultipleAllocations") => return,
            Some("attributes") => &mut self.reads.attributes,
            Some("capacity") => &mut self.reads.capacity,
            _ => {
                self.reads.all = true;
                return;
            }
        };
        match &path[1..] {
            [domain, name, ..] => {
                names.insert(QualifiedName { domain: domain.clone(), name: name.clone() });
            }
            _ => self.reads.all = true,
        }
    }

    fn path(&self, expr: &Expr) -> Option<Path> {
        let (of, step) = match expr {
            Expr::Device => return Some(Path::new()),
            Expr::Local(at) => return self.locals.get(*at)?.clone(),
            Expr::Field(of, name) | Expr::Has(of, name) | Expr::MaybeField(of, name) => (of, name),
            Expr::Item(of, key) | Expr::MaybeItem(of, key) => match &**key {
                Expr::Text(name) => (of, name),
                _ => return None,
            },
            _ => return None,
        };
        let mut path = self.path(of)?;
        path.push(step.clone());
        Some(path)
    }
}
