//! Text → expression, with the CEL crate's parser. Nothing else of the crate is used, and nowhere else.

use super::expr::{Expr, Fold};
use super::function::Function;
use super::pattern::Pattern;
use super::{SelectError, TEXT_BYTES_MAX};
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr as Ast, IdedExpr, LiteralValue, operators,
};
use cel::parser::pratt_parser::{Lexer, TokenKind};
use cel::parser::{ParseErrors, PrattParser};

/// Deeper expressions are refused: parsing, evaluating and dropping them takes stack.
const DEPTH_MAX: u16 = 100;
/// Of all patterns of an expression: compiling them takes time, and keeping them memory.
const PATTERNS_WEIGHT_MAX: u64 = 100_000;

const PARTS: [&str; 4] = ["driver", "attributes", "capacity", "allowMultipleAllocations"];

/// The expression, and the weight of its patterns.
pub fn expression(text: &str) -> Result<(Expr, u64), SelectError> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(SelectError::TooLong(text.len()));
    }
    if depth(text)? > u32::from(DEPTH_MAX) {
        return Err(SelectError::TooDeep { text: text.to_owned() });
    }
    let parser = PrattParser::new().max_recursion_depth(DEPTH_MAX);
    let parser = parser.enable_optional_syntax(true).enable_ident_escape_syntax(true);
    let ast = parser.parse(text).map_err(|errors| syntax(text, &errors))?;
    let mut scope = Scope::default();
    let found = scope.expr(&ast).map_err(|what| SelectError::Unsupported { text: text.to_owned(), what })?;
    Ok((found, scope.patterns_weight))
}

fn syntax(text: &str, errors: &ParseErrors) -> SelectError {
    let first = errors.errors.first();
    let (line, column) = first.map_or((0, 0), |error| error.pos);
    SelectError::Syntax {
        text: text.to_owned(),
        line: usize::try_from(line).unwrap_or(0).max(1),
        column: usize::try_from(column).unwrap_or(0).max(1),
        words: first.map_or_else(String::new, |error| error.msg.clone()),
    }
}

/// Where the text is not even made of words.
fn stray(text: &str, lexer: &Lexer<'_>) -> SelectError {
    let (at, words) = lexer.get_error().map_or((0, ""), |error| (error.start, error.message.as_str()));
    let before = text.get(..at).unwrap_or(text);
    SelectError::Syntax {
        text: text.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before.chars().rev().take_while(|one| *one != '\n').count() + 1,
        words: words.to_owned(),
    }
}

/// At least as deep as the parser nests: brackets, and rows of operators that it nests to the left. Rows of `&&` and
/// `||` it balances.
fn depth(text: &str) -> Result<u32, SelectError> {
    let mut lexer = Lexer::new(text);
    // By open bracket: operators in the row, conditions since it was opened.
    let mut open = vec![(0_u32, 0_u32)];
    let (mut sum, mut most) = (0_u32, 0_u32);
    loop {
        // Brackets that were never opened: the parser has words for it.
        let Some(level) = open.last_mut() else { return Ok(most) };
        match lexer.lex().kind {
            TokenKind::TokEnd => return Ok(most),
            TokenKind::TokError => return Err(stray(text, &lexer)),
            TokenKind::TokLogicalAnd | TokenKind::TokLogicalOr | TokenKind::TokComma => {
                sum -= level.0;
                level.0 = 0;
            }
            TokenKind::TokQuestion => {
                level.1 += 1;
                sum += 1;
            }
            TokenKind::TokLeftParen | TokenKind::TokLeftBracket | TokenKind::TokLeftBrace => {
                level.0 += 1;
                sum += 1;
                open.push((0, 0));
            }
            TokenKind::TokRightParen | TokenKind::TokRightBracket | TokenKind::TokRightBrace => {
                sum -= level.0 + level.1;
                open.pop();
            }
            TokenKind::TokIdent
            | TokenKind::TokWhitespace
            | TokenKind::TokComment
            | TokenKind::TokString
            | TokenKind::TokInt => {}
            _ => {
                level.0 += 1;
                sum += 1;
            }
        }
        most = most.max(sum);
    }
}

/// Variables that the expression brings, outermost first.
#[derive(Default)]
struct Scope {
    locals: Vec<String>,
    patterns_weight: u64,
}

/// What is not supported.
type Parsed = Result<Expr, String>;

impl Scope {
    fn expr(&mut self, ast: &IdedExpr) -> Parsed {
        match &ast.expr {
            Ast::Ident(name) => self.variable(name),
            Ast::Literal(value) => literal(value),
            Ast::Select(select) => {
                let of = Box::new(self.expr(&select.operand)?);
                device_has(&of, &select.field)?;
                let field = select.field.clone();
                Ok(if select.test { Expr::Has(of, field) } else { Expr::Field(of, field) })
            }
            Ast::Call(call) => self.call(call),
            Ast::List(list) if list.optional_indices.is_empty() => Ok(Expr::List(self.all(&list.elements)?)),
            Ast::List(_) => Err("optional elements of lists are not supported".to_owned()),
            Ast::Map(map) => map
                .entries
                .iter()
                .map(|entry| self.entry(&entry.expr))
                .collect::<Result<_, _>>()
                .map(Expr::Map),
            Ast::Comprehension(fold) => self.fold(fold),
            Ast::Struct(message) => Err(format!("messages such as {} are not supported", message.type_name)),
            Ast::Unspecified => Err("a part of it is missing".to_owned()),
        }
    }

    fn all(&mut self, all: &[IdedExpr]) -> Result<Vec<Expr>, String> {
        all.iter().map(|one| self.expr(one)).collect()
    }

    fn boxed(&mut self, ast: &IdedExpr) -> Result<Box<Expr>, String> {
        self.expr(ast).map(Box::new)
    }

    fn variable(&self, name: &str) -> Parsed {
        if let Some(at) = self.locals.iter().rposition(|local| local == name) {
            return Ok(Expr::Local(at));
        }
        match name {
            "device" => Ok(Expr::Device),
            _ => Err(format!("there is no variable {name}; the only one is device")),
        }
    }

    fn entry(&mut self, entry: &EntryExpr) -> Result<(Expr, Expr), String> {
        match entry {
            EntryExpr::MapEntry(entry) if !entry.optional => {
                Ok((self.expr(&entry.key)?, self.expr(&entry.value)?))
            }
            _ => Err("optional entries of maps are not supported".to_owned()),
        }
    }

    fn call(&mut self, call: &CallExpr) -> Parsed {
        if let Some(target) = &call.target {
            return self.member(target, call);
        }
        match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::LOGICAL_AND, [one, other]) => Ok(Expr::And(self.boxed(one)?, self.boxed(other)?)),
            (operators::LOGICAL_OR, [one, other]) => Ok(Expr::Or(self.boxed(one)?, self.boxed(other)?)),
            (operators::CONDITIONAL, [condition, one, other]) => {
                Ok(Expr::If(Box::new([self.expr(condition)?, self.expr(one)?, self.expr(other)?])))
            }
            (operators::INDEX, [of, key]) => Ok(Expr::Item(self.boxed(of)?, self.boxed(key)?)),
            (operators::OPT_INDEX, [of, key]) => Ok(Expr::MaybeItem(self.boxed(of)?, self.boxed(key)?)),
            (operators::OPT_SELECT, [of, name]) => match self.expr(name)? {
                Expr::Text(name) => {
                    let of = self.boxed(of)?;
                    device_has(&of, &name)?;
                    Ok(Expr::MaybeField(of, name))
                }
                _ => Err("a name is missing after .?".to_owned()),
            },
            (name, arguments) => {
                let function = Function::find(name, false, arguments.len())?;
                Ok(Expr::Call(function, self.all(arguments)?))
            }
        }
    }

    fn member(&mut self, target: &IdedExpr, call: &CallExpr) -> Parsed {
        let library = match &target.expr {
            Ast::Ident(name) if !self.locals.contains(name) => Some(name.as_str()),
            _ => None,
        };
        match (library, call.func_name.as_str(), call.args.as_slice()) {
            (Some("cel"), "bind", [name, value, body]) => {
                let value = self.expr(value)?;
                Ok(Expr::Let(Box::new([value, self.with(name, body)?])))
            }
            (Some(library @ ("cel" | "optional" | "strings")), name, arguments) => {
                let function = Function::find(&format!("{library}.{name}"), false, arguments.len())?;
                Ok(Expr::Call(function, self.all(arguments)?))
            }
            (_, name @ ("optMap" | "optFlatMap"), [variable, body]) => {
                let of = self.expr(target)?;
                Ok(Expr::OptMap(Box::new([of, self.with(variable, body)?]), name == "optFlatMap"))
            }
            (_, "matches", [pattern]) => {
                let of = self.boxed(target)?;
                let pattern = self.expr(pattern)?;
                self.matching(of, pattern)
            }
            (_, name, arguments) => {
                let function = Function::find(name, true, arguments.len() + 1)?;
                let mut all = vec![self.expr(target)?];
                all.extend(self.all(arguments)?);
                Ok(Expr::Call(function, all))
            }
        }
    }

    /// The body with one more variable.
    fn with(&mut self, name: &IdedExpr, body: &IdedExpr) -> Parsed {
        let Ast::Ident(name) = &name.expr else { return Err("a variable's name is missing".to_owned()) };
        self.locals.push(name.clone());
        let body = self.expr(body);
        self.locals.pop();
        body
    }

    /// Compiled once: the pattern has to be known by now.
    fn matching(&mut self, of: Box<Expr>, pattern: Expr) -> Parsed {
        let Expr::Text(pattern) = pattern else {
            return Err("matches() takes a pattern in quotes, not one that is computed".to_owned());
        };
        let pattern = Pattern::new(&pattern)?;
        self.patterns_weight = self.patterns_weight.saturating_add(pattern.weight);
        if self.patterns_weight > PATTERNS_WEIGHT_MAX {
            return Err("its patterns are too large in all; split it into several selectors".to_owned());
        }
        Ok(Expr::Matches(of, pattern))
    }

    fn fold(&mut self, fold: &ComprehensionExpr) -> Parsed {
        if fold.iter_var2.is_some() {
            return Err("macros with two variables are not supported".to_owned());
        }
        let (range, init) = (self.expr(&fold.iter_range)?, self.expr(&fold.accu_init)?);
        self.locals.extend([fold.accu_var.clone(), fold.iter_var.clone()]);
        let inner =
            self.expr(&fold.loop_cond).and_then(|condition| Ok((condition, self.expr(&fold.loop_step)?)));
        self.locals.pop();
        let result = self.expr(&fold.result);
        self.locals.pop();
        let ((condition, step), result) = (inner?, result?);
        Ok(Expr::Fold(Box::new(Fold { range, init, condition, step, result })))
    }
}

fn literal(value: &LiteralValue) -> Parsed {
    match value {
        LiteralValue::Null => Ok(Expr::Null),
        LiteralValue::Boolean(value) => Ok(Expr::Bool(*value.inner())),
        LiteralValue::Int(value) => Ok(Expr::Int(*value.inner())),
        LiteralValue::String(text) => Ok(Expr::Text(text.inner().to_owned())),
        LiteralValue::Double(_) => Err("numbers with a decimal point are not supported".to_owned()),
        LiteralValue::UInt(_) => Err("unsigned numbers are not supported; leave out the u".to_owned()),
        LiteralValue::Bytes(_) => Err("bytes are not supported".to_owned()),
    }
}

/// The API server refuses other fields of `device`, too.
fn device_has(of: &Expr, field: &str) -> Result<(), String> {
    if matches!(of, Expr::Device) && !PARTS.contains(&field) {
        return Err(format!("device has no field {field}; it has {}", PARTS.join(", ")));
    }
    Ok(())
}
