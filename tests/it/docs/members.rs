//! Finds the members of the types that the code defines.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The members of types and traits: methods, constants, associated types, fields and variants.
#[derive(Default)]
pub struct Members {
    /// The types and traits that the code defines.
    defined: BTreeSet<String>,
    members: BTreeMap<String, BTreeSet<String>>,
    /// For each type, the traits that `impl` blocks implement for it. Derived traits are missing.
    traits: BTreeMap<String, BTreeSet<String>>,
}

impl Members {
    /// Adds the members that the type definitions, trait definitions and `impl` blocks of a file define.
    pub fn scan(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (index, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.scan(group.stream()),
                TokenTree::Ident(keyword) => {
                    let end = tokens[index..].iter().position(|token| is_body(token) || is_punct(token, ';'));
                    let end = end.map_or(tokens.len(), |end| index + end);
                    let body = tokens.get(end).and_then(|token| match token {
                        TokenTree::Group(group) => Some(group.stream().into_iter().collect()),
                        _ => None,
                    });
                    self.add(&keyword.to_string(), &tokens[index + 1..end], body.unwrap_or_default());
                }
                _ => {}
            }
        }
    }

    /// Adds the members of an item if `keyword` starts a type definition, a trait definition or an `impl` block.
    /// `head` holds the tokens between the keyword and the body.
    fn add(&mut self, keyword: &str, head: &[TokenTree], body: Vec<TokenTree>) {
        let names = match keyword {
            "struct" | "union" => fields(&body),
            "enum" => variants(&body),
            "trait" | "impl" => associated_items(&body),
            _ => return,
        };
        let Some(name) = (if keyword == "impl" { self.implementing_type(head) } else { first_type(&head[..1]) }) else {
            return;
        };
        if keyword != "impl" {
            self.defined.insert(name.clone());
        }
        self.members.entry(name).or_default().extend(names);
    }

    /// Returns the name of the type to which an `impl` block belongs, or `None` if the name has no upper-case initial,
    /// as in `impl Trait for u8`. If the block implements a trait, records that the type implements the trait.
    fn implementing_type(&mut self, head: &[TokenTree]) -> Option<String> {
        let head = &head[generics(head)..];
        let Some(at) = head.iter().position(|token| is_ident(token, "for")) else { return first_type(head) };
        let name = first_type(&head[at + 1..])?;
        self.traits.entry(name.clone()).or_default().extend(first_type(&head[..at]));
        Some(name)
    }

    /// Returns whether a type, or a trait that the type implements, has a member.
    /// Returns `None` if the code does not define the type.
    pub fn has(&self, name: &str, member: &str) -> Option<bool> {
        let is_own = |name: &String| self.members.get(name).is_some_and(|members| members.contains(member));
        let name = self.defined.get(name)?;
        Some(is_own(name) || self.traits.get(name).is_some_and(|traits| traits.iter().any(is_own)))
    }
}

fn is_body(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

fn is_ident(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == word)
}

/// Returns the first identifier that starts with an upper-case letter, if there is one.
fn first_type(tokens: &[TokenTree]) -> Option<String> {
    tokens.iter().find_map(|token| match token {
        TokenTree::Ident(ident) => Some(ident.to_string()).filter(|name| name.starts_with(char::is_uppercase)),
        _ => None,
    })
}

/// Returns the number of tokens in the generic parameters at the start of `head`, or 0 if there are none.
fn generics(head: &[TokenTree]) -> usize {
    let mut depth = 0;
    for (index, token) in head.iter().enumerate() {
        let is_arrow = index > 0 && is_punct(&head[index - 1], '-');
        depth += usize::from(is_punct(token, '<'));
        depth -= usize::from(depth > 0 && is_punct(token, '>') && !is_arrow);
        if depth == 0 {
            return if index == 0 { 0 } else { index + 1 };
        }
    }
    0
}

/// Returns the names of a struct's fields: the names before a colon. The colons of paths (`::`) do not count.
fn fields(body: &[TokenTree]) -> BTreeSet<String> {
    let name = |index: usize| match (&body[index], body.get(index + 1), body.get(index + 2)) {
        (TokenTree::Ident(name), Some(colon), Some(next)) if is_punct(colon, ':') && !is_punct(next, ':') => {
            Some(name.to_string())
        }
        _ => None,
    };
    (0..body.len()).filter_map(name).collect()
}

/// Returns the names of an enum's variants: the first identifier of each comma-separated part of the body.
/// Identifiers in attributes do not count, because the brackets of an attribute form a group.
fn variants(body: &[TokenTree]) -> BTreeSet<String> {
    let parts = body.split(|token| is_punct(token, ','));
    parts
        .filter_map(|part| part.iter().find(|token| matches!(token, TokenTree::Ident(_))))
        .map(|name| name.to_string())
        .collect()
}

/// Returns the names of the functions, constants and types in a trait definition or an `impl` block.
fn associated_items(body: &[TokenTree]) -> BTreeSet<String> {
    let is_keyword = |token: &TokenTree| ["fn", "const", "type"].iter().any(|word| is_ident(token, word));
    let pairs = body.windows(2).filter(|pair| is_keyword(&pair[0]));
    pairs.map(|pair| pair[1].to_string()).collect()
}
