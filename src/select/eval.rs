//! Evaluation: of bounded cost, without any effect.

use std::rc::Rc;

use super::cost::{FAILURE, LIGHT, Meter, STEP};
use super::expr::{Expr, Fold};
use super::facts::DeviceFacts;
use super::function::Function;
use super::value::{Elements, Value};

/// Of words that are kept while a later element may outweigh the failure.
const WORDS_BYTES_MAX: usize = 512;

#[derive(Debug)]
pub enum Trouble {
    /// With what.
    Fails(String),
    /// More than it may.
    Costs,
    /// It takes more memory than it may.
    Swells,
}

impl From<String> for Trouble {
    fn from(mut words: String) -> Self {
        words.truncate(words.floor_char_boundary(WORDS_BYTES_MAX));
        Self::Fails(words)
    }
}

type Evaluated<'a> = Result<Value<'a>, Trouble>;

/// What a whole expression says of a device for so many ticks at most, and what that has cost, in ticks.
pub fn truth(expr: &Expr, device: &DeviceFacts, most: u64) -> (Result<bool, Trouble>, u64) {
    let mut run = Run { device, locals: Vec::new(), meter: Meter::within(most) };
    let found = match run.value(expr) {
        Ok(Value::Bool(truth)) => Ok(truth),
        Ok(other) => {
            Err(Trouble::Fails(format!("it gives {} where true or false is expected", other.kind())))
        }
        Err(trouble) => Err(trouble),
    };
    (found, run.meter.ticks())
}

struct Run<'a> {
    device: &'a DeviceFacts,
    locals: Vec<Value<'a>>,
    meter: Meter,
}

impl<'a> Run<'a> {
    fn value(&mut self, expr: &'a Expr) -> Evaluated<'a> {
        self.meter.pay(if expr.is_light() { LIGHT } else { STEP })?;
        Ok(match expr {
            Expr::Null => Value::Null,
            Expr::Bool(value) => Value::Bool(*value),
            Expr::Int(value) => Value::Int(*value),
            Expr::Text(text) => Value::text(text),
            Expr::Device => Value::Device,
            Expr::Local(at) => match self.locals.get(*at) {
                Some(Value::Failed(words)) => return Err(Trouble::Fails(words.to_string())),
                found => found.cloned().ok_or_else(|| "a variable has no value".to_owned())?,
            },
            Expr::Field(of, name) => self.field(of, &Value::text(name))?,
            Expr::Item(of, key) => {
                let key = self.value(key)?;
                self.field(of, &key)?
            }
            Expr::Has(of, name) => {
                let of = self.value(of)?;
                Value::Bool(of.find(&Value::text(name), self.device, &mut self.meter)?.is_some())
            }
            Expr::MaybeField(of, name) => self.maybe(of, &Value::text(name))?,
            Expr::MaybeItem(of, key) => {
                let key = self.value(key)?;
                self.maybe(of, &key)?
            }
            Expr::List(all) => {
                self.meter.list(all.len())?;
                Value::List(Rc::new(self.values(all)?))
            }
            Expr::Map(all) => {
                self.meter.list(all.len().saturating_mul(2))?;
                let pairs = all.iter().map(|(key, value)| Ok((self.value(key)?, self.value(value)?)));
                Value::Map(Rc::new(pairs.collect::<Result<_, Trouble>>()?))
            }
            Expr::And(one, other) => self.logic(one, other, false)?,
            Expr::Or(one, other) => self.logic(one, other, true)?,
            Expr::If(parts) => match self.value(&parts[0])? {
                Value::Bool(true) => self.value(&parts[1])?,
                Value::Bool(false) => self.value(&parts[2])?,
                other => return Err(format!("the condition before ? is {}", other.kind()).into()),
            },
            Expr::Call(function, arguments) => self.call(*function, arguments)?,
            Expr::Matches(of, pattern) => match self.value(of)? {
                Value::Text(text) => {
                    self.meter.pay(pattern.cost(&text))?;
                    Value::Bool(pattern.regex.is_match(&text))
                }
                other => return Err(format!("matches cannot be applied to {}", other.kind()).into()),
            },
            Expr::Let(parts) => {
                let value = self.value(&parts[0])?;
                self.with(value, &parts[1])?
            }
            Expr::OptMap(parts, flat) => match self.value(&parts[0])? {
                Value::Optional(None) => Value::Optional(None),
                Value::Optional(Some(value)) => {
                    let found = self.with((*value).clone(), &parts[1])?;
                    if *flat { found } else { Value::some(found) }
                }
                other => return Err(format!("{} is not an optional", other.kind()).into()),
            },
            Expr::Fold(fold) => self.fold(fold)?,
        })
    }

    fn values(&mut self, all: &'a [Expr]) -> Result<Vec<Value<'a>>, Trouble> {
        all.iter().map(|one| self.value(one)).collect()
    }

    fn with(&mut self, value: Value<'a>, body: &'a Expr) -> Evaluated<'a> {
        self.locals.push(value);
        let found = self.value(body);
        self.locals.pop();
        found
    }

    /// What is behind a dot, or in brackets. Of an optional: an optional again.
    fn field(&mut self, of: &'a Expr, key: &Value<'a>) -> Evaluated<'a> {
        match self.value(of)? {
            Value::Optional(of) => self.within(of, key),
            of => of.get(key, self.device, &mut self.meter),
        }
    }

    fn maybe(&mut self, of: &'a Expr, key: &Value<'a>) -> Evaluated<'a> {
        match self.value(of)? {
            Value::Optional(of) => self.within(of, key),
            of => self.within(Some(Rc::new(of)), key),
        }
    }

    fn within(&mut self, of: Option<Rc<Value<'a>>>, key: &Value<'a>) -> Evaluated<'a> {
        let Some(of) = of else { return Ok(Value::Optional(None)) };
        let found = match &*of {
            Value::List(list) => match key {
                Value::Int(at) => usize::try_from(*at).ok().and_then(|at| list.get(at)).cloned(),
                _ => return Err(format!("a list has no element {}", key.kind()).into()),
            },
            map => map.find(key, self.device, &mut self.meter)?,
        };
        Ok(found.map_or(Value::Optional(None), Value::some))
    }

    /// `&&` and `||`: what decides wins over what fails, on whichever side it stands.
    fn logic(&mut self, one: &'a Expr, other: &'a Expr, decides: bool) -> Evaluated<'a> {
        let first = self.side(one)?;
        if first == Ok(decides) {
            return Ok(Value::Bool(decides));
        }
        let second = self.side(other)?;
        if second == Ok(decides) {
            return Ok(Value::Bool(decides));
        }
        first.and(second).map(Value::Bool).map_err(Trouble::Fails)
    }

    fn side(&mut self, expr: &'a Expr) -> Result<Result<bool, String>, Trouble> {
        match self.value(expr) {
            Ok(Value::Bool(value)) => Ok(Ok(value)),
            Ok(other) => Ok(Err(format!("{} is used where true or false is expected", other.kind()))),
            Err(Trouble::Fails(words)) => {
                self.meter.pay(FAILURE)?;
                Ok(Err(words))
            }
            Err(trouble) => Err(trouble),
        }
    }

    fn call(&mut self, function: Function, arguments: &'a [Expr]) -> Evaluated<'a> {
        match (function, arguments) {
            (Function::NotFalse, [one]) => Ok(Value::Bool(self.side(one)? != Ok(false))),
            (Function::Or | Function::OrValue, [one, other]) => match self.value(one)? {
                Value::Optional(Some(value)) if function == Function::OrValue => Ok((*value).clone()),
                Value::Optional(Some(value)) => Ok(Value::Optional(Some(value))),
                Value::Optional(None) => self.value(other),
                found => Err(format!("{} is not an optional", found.kind()).into()),
            },
            _ => {
                let values = self.values(arguments)?;
                function.apply(&values, self.device, &mut self.meter)
            }
        }
    }

    fn fold(&mut self, fold: &'a Fold) -> Evaluated<'a> {
        let elements = self.value(&fold.range)?.elements(self.device, &mut self.meter)?;
        let start = self.value(&fold.init)?;
        let at = self.locals.len();
        self.locals.push(start);
        let end = self.steps(fold, at, &elements);
        let result = end.and_then(|()| self.value(&fold.result));
        self.locals.truncate(at);
        result
    }

    fn steps(&mut self, fold: &'a Fold, at: usize, elements: &Elements<'a>) -> Result<(), Trouble> {
        for element in elements.all() {
            self.meter.pay(STEP)?;
            self.locals.truncate(at + 1);
            self.locals.push(element.clone());
            if matches!(self.value(&fold.condition)?, Value::Bool(false)) {
                break;
            }
            // What fails may still be outweighed by a later element: it is kept like a value.
            self.locals[at] = match self.value(&fold.step) {
                Err(Trouble::Fails(words)) => {
                    self.meter.pay(FAILURE)?;
                    Value::Failed(words.into())
                }
                next => next?,
            };
        }
        self.locals.truncate(at + 1);
        Ok(())
    }
}
