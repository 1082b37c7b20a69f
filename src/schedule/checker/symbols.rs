//! What a position holds, as a term over the ranks' inputs. Equal terms have equal numbers.

use std::collections::HashMap;

use crate::schedule::ir::Rank;

/// The number of a term.
pub(super) type Symbol = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Term {
    /// An element of a rank's input.
    Input(Rank),
    /// Left ∘ right.
    Combined(Symbol, Symbol),
    /// The result of the operator's final step.
    Finished(Symbol),
}

/// All terms made so far.
pub(super) struct Symbols {
    terms: Vec<Term>,
    numbers: HashMap<Term, Symbol>,
    /// The ranks in each term, a bit each.
    members: Vec<Box<[u64]>>,
    size: u32,
}

impl Symbols {
    /// No terms yet, over the inputs of `size` ranks.
    pub(super) fn new(size: u32) -> Symbols {
        Symbols { terms: Vec::new(), numbers: HashMap::new(), members: Vec::new(), size }
    }

    /// The input of a rank.
    pub(super) fn input(&mut self, rank: Rank) -> Symbol {
        let mut members = vec![0; self.size.div_ceil(64) as usize].into_boxed_slice();
        members[rank as usize / 64] |= 1 << (rank % 64);
        self.number(Term::Input(rank), || members)
    }

    /// Left ∘ right, unless an operand is finished already or a rank is in both; then, what is wrong.
    pub(super) fn combine(&mut self, left: Symbol, right: Symbol) -> Result<Symbol, String> {
        let term = Term::Combined(left, right);
        if let Some(&known) = self.numbers.get(&term) {
            return Ok(known);
        }
        for operand in [left, right] {
            if let Term::Finished(_) = self.terms[operand as usize] {
                return Err(format!("combines a finished result, {}", self.describe(operand)));
            }
        }
        let (a, b) = (&self.members[left as usize], &self.members[right as usize]);
        if let Some(twice) = (0..self.size).find(|&rank| has(a, rank) && has(b, rank)) {
            return Err(format!(
                "takes rank {twice} twice: {} with {}",
                self.describe(left),
                self.describe(right)
            ));
        }
        let members = a.iter().zip(b.iter()).map(|(a, b)| a | b).collect();
        Ok(self.number(term, || members))
    }

    /// The final step, unless it was done already or a rank is missing; then, what is wrong.
    pub(super) fn finish(&mut self, symbol: Symbol) -> Result<Symbol, String> {
        let term = Term::Finished(symbol);
        if let Some(&known) = self.numbers.get(&term) {
            return Ok(known);
        }
        if let Term::Finished(_) = self.terms[symbol as usize] {
            return Err(format!("finishes {} a second time", self.describe(symbol)));
        }
        let members = self.members[symbol as usize].clone();
        if let Some(missing) = (0..self.size).find(|&rank| !has(&members, rank)) {
            return Err(format!(
                "stores a result without rank {missing} as elements: {}",
                self.describe(symbol)
            ));
        }
        Ok(self.number(term, || members))
    }

    /// The canonical tree over a list.
    pub(super) fn tree(&mut self, operands: &[Symbol]) -> Result<Symbol, String> {
        if let [one] = operands {
            return Ok(*one);
        }
        let (left, right) = operands.split_at(operands.len().next_power_of_two() / 2);
        let (left, right) = (self.tree(left)?, self.tree(right)?);
        self.combine(left, right)
    }

    /// Whether it is the result of a final step. There each input is once, whatever the order.
    pub(super) fn is_finished(&self, symbol: Symbol) -> bool {
        matches!(self.terms[symbol as usize], Term::Finished(_))
    }

    /// The term as text.
    pub(super) fn describe(&self, symbol: Symbol) -> String {
        match self.terms[symbol as usize] {
            Term::Input(rank) => rank.to_string(),
            Term::Combined(left, right) => format!("({}∘{})", self.describe(left), self.describe(right)),
            Term::Finished(result) => format!("final{}", self.describe(result)),
        }
    }

    fn number(&mut self, term: Term, members: impl FnOnce() -> Box<[u64]>) -> Symbol {
        *self.numbers.entry(term).or_insert_with(|| {
            self.terms.push(term);
            self.members.push(members());
            (self.terms.len() - 1) as Symbol
        })
    }
}

fn has(members: &[u64], rank: Rank) -> bool {
    members[rank as usize / 64] >> (rank % 64) & 1 == 1
}
